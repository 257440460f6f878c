"""Whether the owner of a role still serves: judged, watched, and waited for (RFC 0007).

An owner is gone if it has said so, if its process has ended, or if it was silent for its lease.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol

from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError, OwnedError, StoreUnavailableError
from opendata_queue.root.owner_files import (
    ALL_ROLES,
    DEFAULT_LEASE_MS,
    OwnerFiles,
    Tenure,
)
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.runtime.process import ProcessIdentity
from opendata_queue.store import Objects

logger = logging.getLogger(__name__)

_POLLS_PER_LEASE: Final = 10
_STANDBY_POLLS_PER_LEASE: Final = 5
_STANDBY_PAUSE_MS: Final = 2_000
"""The longest: a standby is to serve within the owner's lease and five seconds."""
_TURN_POLL_MS: Final = 100
_OPENING_PATIENCE_MS: Final = 30_000
"""How long a taker waits for those that open the root before it, in all."""
_OPENING_SILENCE_MS: Final = 5_000
"""The least: a process that opens a root on a busy machine may be late with its heartbeat."""


class HeldHere(Protocol):
    """The roles that an ``Ownership`` of this process holds."""

    @property
    def is_kept(self) -> bool:
        """Whether the roles are being taken, or held with heartbeats that go on."""


held_here: weakref.WeakValueDictionary[str, HeldHere] = weakref.WeakValueDictionary()
"""What this process holds, by its holder: it needs no heartbeat to know that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vacancy:
    """What a standby has found: the epoch of each role after which it may come; 0 for none.

    Given to ``takeover``, it takes over from exactly these, and from no owner that came meanwhile.
    """

    epochs: Mapping[str, int]
    durable: Mapping[str, int] = field(default_factory=dict)
    """What these have said of the databases of the roles, as in ``Tenure``."""


class Before(NamedTuple):
    """After which epoch a role is taken, and what is known of its database."""

    epoch: int
    durable: int

    @classmethod
    def of(cls, tenure: Tenure | None) -> Before:
        return cls(0, 0) if tenure is None else cls(tenure.epoch, tenure.durable)


class Verdict(enum.Enum):
    """What can be said of the owner of a role without waiting."""

    GONE = enum.auto()
    ALIVE = enum.auto()
    UNKNOWN = enum.auto()


def judge(tenure: Tenure | None, clock: Clock) -> Verdict:
    """Whether there is an owner, by what is known without waiting."""
    if tenure is None or tenure.released:
        return Verdict.GONE
    owner = tenure.owner
    if owner is None:
        return Verdict.UNKNOWN
    here = held_here.get(owner.holder)
    if here is not None and here.is_kept:
        return Verdict.ALIVE
    process = owner.process
    if process == ProcessIdentity.of_this_process() and process.machine is not None:
        return Verdict.GONE  # it was ours, and was let go without being closed
    lives = process.lives()
    if lives is False:
        return Verdict.GONE
    # Our clock is the owner's clock: a heartbeat that is not fresh may still be on its way.
    if lives and tenure.is_fresh(clock.now_ms()):
        return Verdict.ALIVE
    return Verdict.UNKNOWN


async def stand_by(objects: Objects, roles: Sequence[str] = ALL_ROLES, *, clock: Clock) -> Vacancy:
    """Wait until the owner of each role is gone, has given up, or is silent for its lease.

    What it returns is for ``takeover``: if another standby was faster, that raises ``OwnedError``,
    and one stands by again.
    """
    watches = [_Watch(OwnerFiles(objects, role), clock) for role in roles]
    while True:
        await asyncio.gather(*(watch.try_to_poll() for watch in watches))
        if all(watch.is_vacant for watch in watches):
            return Vacancy(
                epochs={watch.files.role: watch.before.epoch for watch in watches},
                durable={
                    watch.files.role: watch.before.durable
                    for watch in watches
                    if watch.before.durable
                },
            )
        pause_ms = min(watch.standby_pause_ms for watch in watches if not watch.is_vacant)
        await clock.wait_until(clock.now_ms() + pause_ms)
        for watch in watches:
            watch.waited(pause_ms)


async def wait_until_silent(files: OwnerFiles, clock: Clock) -> Before:
    """Wait for as long as the owner's lease; what to come after, if it gave no sign of life.

    If it did, or another process has taken the role, ``OwnedError``.
    """
    watch = _Watch(files, clock)
    await watch.poll()
    first = watch.tenure
    pause_ms = watch.lease_ms // _POLLS_PER_LEASE
    while not watch.is_vacant:
        await clock.wait_until(clock.now_ms() + pause_ms)
        watch.waited(pause_ms)
        await watch.poll()
        if watch.verdict is Verdict.ALIVE or watch.has_moved_since(first):
            raise refusal(files, watch.tenure)
    return watch.before


class _Watch:
    """How long an owner has been silent, by how long this process has waited.

    Only the waits count, and the reads in between, each for a wait at most, not what a clock shows:
    one that was set, or a process that was stopped, must not make an owner seem dead.
    """

    def __init__(self, files: OwnerFiles, clock: Clock) -> None:
        self.files = files
        self.tenure: Tenure | None = None
        self.verdict = Verdict.UNKNOWN
        self._clock = clock
        self._silent_ms = 0
        self._last_wait_ms = 0

    @property
    def before(self) -> Before:
        return Before.of(self.tenure)

    @property
    def lease_ms(self) -> int:
        return DEFAULT_LEASE_MS if self.tenure is None else self.tenure.lease_ms

    @property
    def is_vacant(self) -> bool:
        return self.verdict is Verdict.GONE or self._silent_ms >= self.lease_ms

    @property
    def standby_pause_ms(self) -> int:
        """Until the next poll: often enough to notice a last heartbeat soon, and not too late."""
        pause_ms = min(self.lease_ms // _STANDBY_POLLS_PER_LEASE, _STANDBY_PAUSE_MS)
        return min(pause_ms, self.lease_ms - self._silent_ms)

    @property
    def is_opening(self) -> bool:
        """Whether it is about to serve, and may be waited for."""
        if self.tenure is None or not self.tenure.is_opening or self.verdict is Verdict.GONE:
            return False
        return self._silent_ms < max(self.lease_ms, _OPENING_SILENCE_MS)

    def waited(self, milliseconds: int) -> None:
        self._silent_ms += milliseconds
        self._last_wait_ms = milliseconds

    async def poll(self) -> None:
        began_at = self._clock.now_ms()
        before, self.tenure = self.tenure, await self.files.newest()
        # With 30 ms for each request a poll takes half as long as a wait of a lease of 1 s.
        self._silent_ms += max(0, min(self._clock.now_ms() - began_at, self._last_wait_ms))
        self.verdict = judge(self.tenure, self._clock)
        if self.has_moved_since(before):
            self._silent_ms = 0

    async def try_to_poll(self) -> None:
        """The same, but a store that is out for a while says nothing of an owner."""
        try:
            await self.poll()
        except StoreUnavailableError as error:
            logger.info("could not check the owner of %s: %s", self.files, error)
            self.verdict = Verdict.UNKNOWN
            self._silent_ms = 0

    def has_moved_since(self, before: Tenure | None) -> bool:
        """Whether the owner has given a sign of life, or is another one."""
        if self.tenure is None or before is None:
            return self.tenure is not before
        if self.tenure.released:  # its heartbeat is not read any more
            return self.tenure.epoch != before.epoch
        return (self.tenure.epoch, self.tenure.count) != (before.epoch, before.count)


async def epoch_at_turn(files: OwnerFiles, clock: Clock, *, raced: bool) -> Before:
    """The epoch after which a role may be taken over, when no other process is about to serve.

    ``OwnedError`` if one has come to serve since this call began, or ``raced`` with it.
    """
    watch = _Watch(files, clock)
    await watch.poll()
    waited_ms = 0
    while watch.is_opening and waited_ms < _OPENING_PATIENCE_MS:
        raced = True
        await clock.wait_until(clock.now_ms() + _TURN_POLL_MS)
        waited_ms += _TURN_POLL_MS
        watch.waited(_TURN_POLL_MS)
        await watch.poll()
    if raced and not watch.is_opening and not watch.is_vacant:
        raise refusal(files, watch.tenure, "has just been taken over by")
    return watch.before


async def epochs_before(
    files: Sequence[OwnerFiles], clock: Clock, takeover: Literal[False] | Vacancy
) -> list[Before]:
    """The epochs after which roles may be taken. An owner of several is waited for once."""
    judging = [asyncio.create_task(_epoch_before(one, clock, takeover)) for one in files]
    try:
        return [await one for one in judging]
    finally:
        await end_tasks(judging)
        for one in judging:
            if not one.cancelled():
                one.exception()  # seen: the first one is raised


async def _epoch_before(
    files: OwnerFiles, clock: Clock, takeover: Literal[False] | Vacancy
) -> Before:
    """The epoch after which a role may be taken."""
    if isinstance(takeover, Vacancy):
        if files.role not in takeover.epochs:
            raise InvalidInputError(f"takeover says nothing of {files}")
        return Before(takeover.epochs[files.role], takeover.durable.get(files.role, 0))
    tenure = await files.newest()
    if tenure is None:
        return Before.of(None)
    verdict = judge(tenure, clock)
    if verdict is Verdict.ALIVE:
        raise refusal(files, tenure)
    if verdict is Verdict.UNKNOWN:
        logger.warning(
            "%s was served by %s: waiting %s ms for a sign of life",
            files,
            tenure.owner or "an unknown process",
            tenure.lease_ms,
        )
        return await wait_until_silent(files, clock)
    return Before.of(tenure)


def refusal(files: OwnerFiles, tenure: Tenure | None, how: str = "is served by") -> OwnedError:
    owner = None if tenure is None else tenure.owner
    if owner is None:
        return OwnedError(f"{files} was taken by another process: find out which one serves it")
    advice = f"connect to {owner.address}" if owner.address else "use it there"
    return OwnedError(
        f"{files} {how} {owner}: {advice}, stop it, or take it over "
        "(takeover=True, odq serve --takeover)",
        host=owner.host,
        pid=owner.pid,
        name=owner.name,
        address=owner.address,
    )
