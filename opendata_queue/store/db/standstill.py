"""Readers of files that stood still for longer than manifests are kept: they say so.

A reader of SlateDB tries for the manifest behind the one that it has. On S3 a boundary says that
there are others when that one is gone (RFC 0015). On files there is none: a reader that was
suspended for longer than ``garbage_age_ms`` takes what it has for the newest, and shows no new row
ever again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.store.errors import translated
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.slatedb_files.manifests import admin_of
from opendata_queue.store.waiting import in_time

_CHECKS_PER_AGE: Final = 4
_POLLS: Final = 2
_LEAST_WAIT_MS: Final = 1_000
_STEP_SECONDS: Final = 0.02


class Standstill:
    """Compares what a reader shows with the newest manifest, four times in a garbage's age.

    What it can't come to see any more has left the WAL: all of that has numbers up to the last one
    in files, which the manifest names. The count of elapsed time goes on while a process or a
    machine is suspended, so the first read after that is compared before it is answered.
    """

    __slots__ = (
        "_checked_ns",
        "_checking",
        "_elapsed_ns",
        "_every_ns",
        "_objects",
        "_path",
        "_position",
        "_wait_ms",
        "found",
    )

    def __init__(
        self,
        objects: Objects,
        path: str,
        position: Callable[[], int | None],
        *,
        poll_interval_ms: int,
    ) -> None:
        self._objects = objects
        self._path = path
        self._position = position
        self._wait_ms = max(_LEAST_WAIT_MS, _POLLS * poll_interval_ms)
        self._every_ns = objects.settings.garbage_age_ms * 1_000_000 // _CHECKS_PER_AGE
        self._elapsed_ns = SystemClock().elapsed_ns
        self._checked_ns = self._elapsed_ns()
        self._checking = asyncio.Lock()
        self.found: StoreUnavailableError | None = None

    @staticmethod
    def can_come(objects: Objects, poll_interval_ms: int) -> bool:
        """Whether it has to be checked: not for a reader that shall stay where it is."""
        on_files = objects.location.kind is StoreKind.FILE
        return on_files and poll_interval_ms <= max(
            _LEAST_WAIT_MS, objects.settings.garbage_age_ms // _CHECKS_PER_AGE
        )

    async def check(self) -> None:
        """An error if the reader does not move on any more, and has to be opened again."""
        if self.found is None and self._elapsed_ns() - self._checked_ns < self._every_ns:
            return
        async with self._checking:
            began_ns = self._elapsed_ns()
            if self.found is None and began_ns - self._checked_ns >= self._every_ns:
                await self._compare()
                self._checked_ns = began_ns
        if self.found is not None:
            raise self.found

    async def _compare(self) -> None:
        name = self._objects.location.url_of(self._path)
        doing = f"read {name}"
        with translated(doing):
            reading = admin_of(self._objects, self._path).read_manifest(None)
            newest = await in_time(reading, self._objects.settings.outage_timeout_ms, doing)
        if newest is None or await self._comes_to(int(newest.last_l0_seq)):
            return
        self.found = StoreUnavailableError(
            f"could not {doing}: this reader stood still for longer than files are kept for it, "
            "and has to be opened again"
        )

    async def _comes_to(self, wanted: int) -> bool:
        """Whether the reader shows so much, after its next poll at the latest."""
        try:
            async with asyncio.timeout(self._wait_ms / 1000):
                # SlateDB does not say when it has polled.
                while (position := self._position()) is not None and position < wanted:  # noqa: ASYNC110
                    await asyncio.sleep(_STEP_SECONDS)
        except TimeoutError:
            return False
        return True  # one that has failed says why itself
