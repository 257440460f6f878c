"""The names of queues, in their order, by pages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Final

from opendata_queue.model.checks import check_integer
from opendata_queue.model.errors import InvalidInputError

_MOST: Final = (1 << 63) - 1


class SortedNames:
    """Names that are sorted when they are first asked for, and kept so: there may be 100,000."""

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def page(
        self, all_names: Iterable[str], prefix: str, after: str, limit: int | None
    ) -> list[str]:
        if self._names is None:
            self._names = sorted(all_names)
        return page_of(self._names, prefix, after, limit)

    def add(self, name: str) -> None:
        if self._names is not None:
            insort(self._names, name)

    def remove(self, name: str) -> None:
        if self._names is not None:
            del self._names[bisect_left(self._names, name)]


def page_of(names: list[str], prefix: str, after: str, limit: int | None) -> list[str]:
    """Those of some sorted names that begin with ``prefix`` and are behind ``after``."""
    for what, text in (("prefix", prefix), ("after", after)):
        if not isinstance(text, str):
            raise InvalidInputError(f"{what} is {text!r}, which is no text")
    if limit is not None:
        check_integer("limit", limit, 1, _MOST)
    start = bisect_right(names, after) if after else 0
    start = max(start, bisect_left(names, prefix))
    end = bisect_left(names, True, start, key=lambda name: not name.startswith(prefix))
    return names[start : end if limit is None else min(end, start + limit)]
