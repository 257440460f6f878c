"""How collecting the garbage of a database has fared."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from opendata_queue.model.errors import OdqError
from opendata_queue.model.figures import Figure
from opendata_queue.store.waiting import is_worth_a_warning

logger = logging.getLogger(__name__)


class GarbageRecord:
    """Counts rounds, and knows why the last ones have failed, if they have.

    Garbage can wait, and a store that is gone shows at the next commit. But where no round succeeds
    any more, objects pile up: that is logged, ever more rarely, counted and shown.
    """

    __slots__ = ("_failed", "_in_a_row", "_name", "_reason", "_rounds")

    def __init__(self, name: str) -> None:
        self._name = name
        self._rounds = 0
        self._failed = 0
        self._in_a_row = 0
        self._reason = ""

    def succeeded(self) -> None:
        self._rounds += 1
        if self._in_a_row:
            logger.warning("the garbage of %s is collected again", self._name)
        self._in_a_row = 0

    def failed(self, error: OdqError) -> None:
        self._rounds += 1
        self._failed += 1
        self._in_a_row += 1
        self._reason = str(error)
        if is_worth_a_warning(self._in_a_row):
            logger.warning("%s (%d times in a row)", error, self._in_a_row)

    @property
    def trouble(self) -> str | None:
        """What is wrong, for people, if more than one round in a row has failed."""
        if self._in_a_row < 2:
            return None
        return f"garbage piles up, {self._in_a_row} rounds in a row have failed: {self._reason}"

    def figures(self, labels: tuple[tuple[str, str], ...]) -> Iterator[Figure]:
        yield Figure(
            name="odq_garbage_rounds",
            help="How often files that are not needed any more were looked for.",
            kind="counter",
            labels=labels,
            value=self._rounds,
        )
        yield Figure(
            name="odq_garbage_rounds_failed",
            help="How often that has failed, or has got no answer in time.",
            kind="counter",
            labels=labels,
            value=self._failed,
        )
        yield Figure(
            name="odq_garbage_failures_in_a_row",
            help="How many of the last ones have failed; with many, objects pile up.",
            kind="gauge",
            labels=labels,
            value=self._in_a_row,
        )
