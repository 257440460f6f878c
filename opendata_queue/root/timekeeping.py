"""The time of a root, by what its owners have left in the store (RFC 0012)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import OdqError
from opendata_queue.root.clock import RootClock
from opendata_queue.root.owner_files import QUEUES_ROLE, Heartbeat, OwnerFiles, RootTime, if_whole
from opendata_queue.store import Objects

logger = logging.getLogger(__name__)

BELIEVED_BEHIND_MS: Final = 3_600_000
"""A root whose time is further behind the machine's clock takes that one when it is opened."""
FOLLOWED_EVERY_MS: Final = 300_000
_WHOLE_SECOND_MS: Final = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Dated:
    """A moment that the store has seen, and this process."""

    store_ms: int
    elapsed_ns: int


def said(clock: RootClock) -> RootTime:
    """What an owner says of the time."""
    elapsed_ms = clock.elapsed_ns() // 1_000_000
    return RootTime(at=clock.now_ms(), timeline=clock.timeline, elapsed_ms=elapsed_ms)


async def last_root_time(objects: Objects) -> RootTime | None:
    """What the last owner of the queues has said; none if there was none, or it could not say."""
    return await OwnerFiles(objects, QUEUES_ROLE).root_time()


async def dated(objects: Objects, path: str, written_ns: int) -> Dated | None:
    """When a file was written that this process had written at ``written_ns``, if it is there."""
    found = await objects.read_dated(path)
    return None if found is None else Dated(store_ms=found[1], elapsed_ns=written_ns)


def _same_timeline(known: RootTime, machine: Clock) -> bool:
    return known.timeline is not None and known.timeline == machine.timeline


def root_now_ms(known: RootTime | None, machine: Clock, seen: Dated | None) -> int | None:
    """The time of a root now, by a clock that both have seen: its owner, and this process.

    It errs to the past: the store shows when a write has ended, and may leave out the fraction of
    a second.
    """
    if known is None:
        return None
    now_ns = machine.elapsed_ns()
    if _same_timeline(known, machine):
        return known.at + max(0, now_ns // 1_000_000 - known.elapsed_ms)
    if known.store_at is None or seen is None:
        return None
    passed_ms = seen.store_ms - known.store_at
    if not (seen.store_ms % _WHOLE_SECOND_MS or known.store_at % _WHOLE_SECOND_MS):
        passed_ms -= _WHOLE_SECOND_MS
    return known.at + max(0, passed_ms) + (now_ns - seen.elapsed_ns) // 1_000_000


async def follow_root(
    objects: Objects, clock: RootClock, known: RootTime | None, heartbeat_path: str
) -> None:
    """Let the clock of a process that only publishes agree with that of the root, from now on."""
    machine = clock.machine
    clock.follow(clock.ahead_ms)
    while True:
        await machine.wait_until(machine.now_ms() + FOLLOWED_EVERY_MS)
        try:
            first, known = known is None, await last_root_time(objects)
            seen = await _last_heartbeat(objects, heartbeat_path)
        except OdqError as error:
            logger.info("could not compare the clock with that of the root: %s", error)
            continue
        now_ms = root_now_ms(known, machine, seen)
        if now_ms is not None and first:
            clock.start_no_earlier(now_ms)  # until now there was no such time
        if now_ms is not None:
            clock.follow(now_ms - machine.now_ms())


async def _last_heartbeat(objects: Objects, path: str) -> Dated | None:
    """When the store has seen the last heartbeat of this process."""
    found = await objects.read_dated(path)
    said = None if found is None else if_whole(Heartbeat, found[0], objects.location.url_of(path))
    if found is None or said is None or said.root is None:
        return None
    return Dated(store_ms=found[1], elapsed_ns=said.root.elapsed_ms * 1_000_000)


async def reading_clock(objects: Objects, machine: Clock) -> RootClock:
    """The clock of a root for a reader, as far as that can be known.

    On another machine than the owner's it is assumed that the clocks of both show the same.
    """
    clock = RootClock(machine)
    known = await last_root_time(objects)
    if known is None:
        return clock
    now_ms = root_now_ms(known, machine, None)
    if now_ms is None and known.wall_at is not None:
        now_ms = max(known.at, machine.now_ms() + known.at - known.wall_at)
    if now_ms is not None and machine.now_ms() - now_ms <= BELIEVED_BEHIND_MS:
        clock.start(now_ms)
        clock.follow(clock.ahead_ms)
    return clock


async def continued_clock(
    objects: Objects, machine: Clock, known: RootTime | None, path: str
) -> RootClock:
    """A clock that goes on where the root's was left, for the process that has written ``path``."""
    clock = RootClock(machine)
    written_ns = machine.elapsed_ns()
    seen = None
    if known is not None and not _same_timeline(known, machine):
        seen = await dated(objects, path, written_ns)
    now_ms = root_now_ms(known, machine, seen)
    if now_ms is None:
        return clock
    behind_ms = machine.now_ms() - now_ms
    if behind_ms > BELIEVED_BEHIND_MS:
        logger.warning(
            "the time of %s is %d s behind this machine's clock, which is taken instead: leases, "
            "delays and retentions of before end early, unless it was at rest for so long",
            objects.location,
            behind_ms // 1000,
        )
        return clock
    clock.start(now_ms)
    return clock
