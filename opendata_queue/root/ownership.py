"""Taking the roles of a root, keeping them, and giving them up (RFC 0007).

SlateDB's fencing keeps the data safe whatever happens here. This module sees to it that no owner is
fenced by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import secrets
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Self

from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import (
    FencedError,
    InvalidInputError,
    OdqError,
    OwnedError,
    StoreUnavailableError,
)
from opendata_queue.root.owner_files import (
    DEFAULT_LEASE_MS,
    MAX_LEASE_MS,
    MIN_LEASE_MS,
    QUEUES_ROLE,
    Heartbeat,
    Owner,
    OwnerFiles,
    Release,
    RootTime,
    Tenure,
    messages_role,
)
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.runtime.process import ProcessIdentity
from opendata_queue.store import Objects

logger = logging.getLogger(__name__)

ALL_ROLES: Final = (QUEUES_ROLE, messages_role(0))
"""What a process holds that does everything, in the order in which they are taken."""

_BEATS_PER_LEASE: Final = 3
_LOOKS_PER_LEASE: Final = 10
_STANDBY_LOOKS_PER_LEASE: Final = 5
_STANDBY_PAUSE_MS: Final = 2_000
"""The longest: a standby is to serve within the owner's lease and five seconds."""
_RELEASE_TIMEOUT_MS: Final = 5_000
_TRIES: Final = 100
_TURN_LOOK_MS: Final = 100
_OPENING_PATIENCE_MS: Final = 30_000
"""How long a taker waits for those that open the root before it, in all."""
_OPENING_SILENCE_MS: Final = 5_000
"""The least: a process that opens a root on a busy machine may be late with its heartbeat."""
_LONGEST_NAME: Final = 255

_held_here: weakref.WeakValueDictionary[str, Ownership] = weakref.WeakValueDictionary()


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
    here = _held_here.get(owner.holder)
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


class Ownership:
    """The roles that one process holds of a root, kept by a task of its own.

    ``on_lost`` is called once, in the event loop, when another process has taken one of them. Once
    ``has_failed`` says so, there are no more heartbeats: what does not work must not keep others
    from taking over.
    """

    def __init__(self, files: Sequence[OwnerFiles], owner: Owner, clock: Clock) -> None:
        self.owner = owner
        self.epochs: dict[str, int] = {}
        self.on_lost: Callable[[FencedError], None] | None = None
        self.has_failed: Callable[[], bool] = lambda: False
        self._root_time: Callable[[], RootTime | None] = lambda: owner.root
        self._before: dict[str, int] = {}
        """Up to where owners before have said that the databases of the roles are durable."""
        self._durable: dict[str, Callable[[], int]] = {}
        self._files = files
        self._clock = clock
        self._count = 0
        self._lost: FencedError | None = None
        self._written_at = clock.now_ms()
        self._warned = False
        self._is_opening = owner.opening
        self._beating = asyncio.Lock()
        """Held by a heartbeat: an older one must not be written over a newer."""
        self._loop = asyncio.get_running_loop()
        self._keeping: asyncio.Task[None] | None = None
        self._released = False

    @classmethod
    async def acquire(
        cls,
        objects: Objects,
        roles: Sequence[str] = ALL_ROLES,
        *,
        clock: Clock,
        takeover: bool | Vacancy = False,
        address: str | None = None,
        name: str | None = None,
        lease_ms: int = DEFAULT_LEASE_MS,
        opening: bool = False,
        root: RootTime | None = None,
    ) -> Self:
        """Take roles, all or none; ``OwnedError`` if another process serves one of them.

        Where it is not known whether an owner is alive, this waits for as long as that one's
        lease, or until it gives a sign of life. With ``takeover=True`` an owner that serves is not
        asked. One that is just ``opening`` what it took is waited for: of several that take a root
        over at once, one comes to serve, and the others are refused.

        With ``opening`` others wait for this process in the same way, until it calls ``opened``.
        ``root`` is what is known of the time of the root, for the next one if this one says no
        more.
        """
        owner = _this_process(clock, address, name, lease_ms, opening=opening)
        owner = owner.model_copy(update={"root": root})
        files = [OwnerFiles(objects, role) for role in roles]
        taken = cls(files, owner, clock)
        _held_here[owner.holder] = taken
        try:
            if takeover is True:
                await taken._take_over()
            else:
                befores = await _epochs_before(files, clock, takeover)
                for one, before in zip(files, befores, strict=True):
                    await taken._take(one, before, exactly=isinstance(takeover, Vacancy))
        except BaseException:
            await taken.release()
            raise
        taken._keeping = asyncio.create_task(taken._keep(), name=f"keep {objects.location}")
        return taken

    @property
    def is_kept(self) -> bool:
        """Whether the roles are being taken, or held with heartbeats that go on."""
        if self._released or self._loop.is_closed():
            return False
        return self._keeping is None or not self._keeping.done()

    async def check(self) -> None:
        """Raise ``FencedError`` if another process has taken a role meanwhile."""
        await self._look_for_others()
        if self._lost is not None:
            raise self._lost.with_traceback(None)

    @property
    def owner_path(self) -> str:
        """The file that was created for the first of the roles."""
        return self._files[0].owner_path(self.epochs[self._files[0].role])

    @property
    def heartbeat_path(self) -> str:
        """The file of the heartbeats for the first of the roles."""
        return self._files[0].heartbeat_path(self.epochs[self._files[0].role])

    def acknowledged(self, role: str) -> int:
        """Up to which sequence number earlier owners have said that a role's database is durable.

        The process that opens that database needs it (RFC 0013).
        """
        return self._before.get(role, 0)

    def say_durable(self, role: str, durable: Callable[[], int]) -> None:
        """From now on, have heartbeats and the release say how far a role's database is durable."""
        self._durable[role] = durable

    def forget_durable(self, role: str) -> None:
        """After a repair: what is missing at the end of a database is not missed any more."""
        self._before.pop(role, None)

    def _durable_of(self, role: str) -> int:
        durable = self._durable.get(role)
        return max(self.acknowledged(role), 0 if durable is None else durable())

    async def release(self) -> None:
        """Give the roles up. What can't be written is logged: others then wait for the lease."""
        await end_tasks([self._keeping])
        already, self._released = self._released, True
        if already or self._lost is not None:
            return
        root = self._root_time()
        release = Release(holder=self.owner.holder, at=self._clock.now_ms(), root=root)
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_MS / 1000):
                for one in self._files:
                    if one.role in self.epochs:
                        durable = self._durable_of(one.role)
                        said = release.model_copy(update={"durable": durable})
                        await one.release(self.epochs[one.role], said)
        except (OdqError, TimeoutError) as error:
            logger.warning(
                "could not say that %s was given up: %s", self.owner, str(error) or "no answer"
            )

    async def opened(self, root_time: Callable[[], RootTime]) -> None:
        """Say that this process serves from now on: another one may take over from it.

        This heartbeat and all that follow say the time of the root, too.
        """
        self._is_opening = False
        self._root_time = root_time
        if self._lost is None:
            await self._beat()

    async def _take(self, files: OwnerFiles, before: Before, *, exactly: bool) -> None:
        """Take a role after an epoch, or after later ones of owners that are gone."""
        for _ in range(_TRIES):
            if await self._create(files, before):
                return
            tenure = await files.newest()
            # The process that was faster came just now: there is no need to wait for its heartbeat.
            # It may have been this process, in a call that was given up before its end.
            if exactly or tenure is None or judge(tenure, self._clock) is not Verdict.GONE:
                raise _refusal(files, tenure)
            before = Before.of(tenure)
        raise StoreUnavailableError(f"{files} changes hands faster than it can be taken")

    async def _take_over(self) -> None:
        """Take all roles from those who have them.

        The first role decides. Its holder takes the others as they are: a process that has them
        without the first is on its way out.
        """
        for one in self._files:
            raced = False
            for _ in range(_TRIES):
                if one is self._files[0]:
                    before = await _epoch_at_turn(one, self._clock, raced=raced)
                else:
                    before = Before.of(await one.newest())
                if await self._create(one, before):
                    break
                raced = True
            else:
                raise StoreUnavailableError(f"{one} changes hands faster than it can be taken")

    async def _create(self, files: OwnerFiles, before: Before) -> bool:
        """Try to become the owner with the next epoch; false if another process was faster."""
        epoch = before.epoch + 1
        self._before[files.role] = before.durable
        owner = self.owner.model_copy(update={"durable": before.durable})
        creating = asyncio.ensure_future(files.create(epoch, owner))
        try:
            created = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # The store does it all the same: it has to be known, and given up again.
            with contextlib.suppress(OdqError, TimeoutError):
                async with asyncio.timeout(_RELEASE_TIMEOUT_MS / 1000):
                    if await creating:
                        self.epochs[files.role] = epoch
            raise
        if not created:
            return False
        self.epochs[files.role] = epoch
        # Else we were so slow that this number had been used, and removed, by others.
        return await files.is_newest(epoch)

    # --- keeping ----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        await self._tidy_up()
        while self._lost is None:
            pause_ms = self.owner.lease_ms // _BEATS_PER_LEASE
            await self._clock.wait_until(self._clock.now_ms() + pause_ms)
            if self.has_failed():
                logger.warning("%s has failed: close it and open it again", self.owner)
                return
            await asyncio.gather(self._beat(), self._watch())

    async def _tidy_up(self) -> None:
        try:
            for one in self._files:
                await one.remove_below(self.epochs[one.role])
        except OdqError as error:
            logger.info("could not remove the files of earlier owners: %s", error)

    async def _beat(self) -> None:
        async with self._beating:
            await self._beat_now()

    async def _beat_now(self) -> None:
        self._count += 1
        now = self._clock.now_ms()
        heartbeat = Heartbeat(
            holder=self.owner.holder,
            count=self._count,
            at=now,
            opening=self._is_opening,
            root=self._root_time(),
        )
        try:
            async with asyncio.timeout(self.owner.lease_ms / 1000):
                await asyncio.gather(*(self._beat_of(one, heartbeat) for one in self._files))
        except (OdqError, TimeoutError) as error:
            silent_ms = self._clock.now_ms() - self._written_at
            if silent_ms > self.owner.lease_ms and not self._warned:
                self._warned = True
                logger.warning(
                    "no heartbeat could be written for %s ms, a standby may take over: %s",
                    silent_ms,
                    str(error) or "no answer",
                )
        else:
            self._written_at = now
            self._warned = False

    async def _beat_of(self, files: OwnerFiles, heartbeat: Heartbeat) -> None:
        durable = self._durable_of(files.role)
        said = heartbeat.model_copy(update={"durable": durable})
        await files.beat(self.epochs[files.role], said)

    async def _watch(self) -> None:
        try:
            async with asyncio.timeout(self.owner.lease_ms / 1000):
                await self._look_for_others()
        except (OdqError, TimeoutError) as error:
            logger.info("could not look for other owners: %s", str(error) or "no answer")

    async def _look_for_others(self) -> None:
        holder = self.owner.holder
        held = await asyncio.gather(
            *(one.is_held(self.epochs[one.role], holder) for one in self._files)
        )
        lost = [one for one, is_held in zip(self._files, held, strict=True) if not is_held]
        if lost and self._lost is None:
            self._step_down(lost[0])

    def _step_down(self, files: OwnerFiles) -> None:
        self._lost = FencedError(f"another process has taken over {files}")
        logger.warning("%s", self._lost)
        if self.on_lost is not None:
            self.on_lost(self._lost)


async def stand_by(objects: Objects, roles: Sequence[str] = ALL_ROLES, *, clock: Clock) -> Vacancy:
    """Wait until the owner of each role is gone, has given up, or is silent for its lease.

    What it returns is for ``takeover``: if another standby was faster, that raises ``OwnedError``,
    and one stands by again.
    """
    watches = [_Watch(OwnerFiles(objects, role), clock) for role in roles]
    while True:
        await asyncio.gather(*(watch.try_to_look() for watch in watches))
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
    await watch.look()
    first = watch.tenure
    pause_ms = watch.lease_ms // _LOOKS_PER_LEASE
    while not watch.is_vacant:
        await clock.wait_until(clock.now_ms() + pause_ms)
        watch.waited(pause_ms)
        await watch.look()
        if watch.verdict is Verdict.ALIVE or watch.has_moved_since(first):
            raise _refusal(files, watch.tenure)
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
        pause_ms = min(self.lease_ms // _STANDBY_LOOKS_PER_LEASE, _STANDBY_PAUSE_MS)
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

    async def look(self) -> None:
        began_at = self._clock.now_ms()
        before, self.tenure = self.tenure, await self.files.newest()
        # With 30 ms for each request a poll takes half as long as a wait of a lease of 1 s.
        self._silent_ms += max(0, min(self._clock.now_ms() - began_at, self._last_wait_ms))
        self.verdict = judge(self.tenure, self._clock)
        if self.has_moved_since(before):
            self._silent_ms = 0

    async def try_to_look(self) -> None:
        """The same, but a store that is out for a while says nothing of an owner."""
        try:
            await self.look()
        except StoreUnavailableError as error:
            logger.info("could not look for the owner of %s: %s", self.files, error)
            self.verdict = Verdict.UNKNOWN
            self._silent_ms = 0

    def has_moved_since(self, before: Tenure | None) -> bool:
        """Whether the owner has given a sign of life, or is another one."""
        if self.tenure is None or before is None:
            return self.tenure is not before
        if self.tenure.released:  # its heartbeat is not read any more
            return self.tenure.epoch != before.epoch
        return (self.tenure.epoch, self.tenure.count) != (before.epoch, before.count)


async def _epoch_at_turn(files: OwnerFiles, clock: Clock, *, raced: bool) -> Before:
    """The epoch after which a role may be taken over, when no other process is about to serve.

    ``OwnedError`` if one has come to serve since this call began, or ``raced`` with it.
    """
    watch = _Watch(files, clock)
    await watch.look()
    waited_ms = 0
    while watch.is_opening and waited_ms < _OPENING_PATIENCE_MS:
        raced = True
        await clock.wait_until(clock.now_ms() + _TURN_LOOK_MS)
        waited_ms += _TURN_LOOK_MS
        watch.waited(_TURN_LOOK_MS)
        await watch.look()
    if raced and not watch.is_opening and not watch.is_vacant:
        raise _refusal(files, watch.tenure, "has just been taken over by")
    return watch.before


async def _epochs_before(
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
        raise _refusal(files, tenure)
    if verdict is Verdict.UNKNOWN:
        logger.warning(
            "%s was served by %s: waiting %s ms for a sign of life",
            files,
            tenure.owner or "an unknown process",
            tenure.lease_ms,
        )
        return await wait_until_silent(files, clock)
    return Before.of(tenure)


def _refusal(files: OwnerFiles, tenure: Tenure | None, how: str = "is served by") -> OwnedError:
    owner = None if tenure is None else tenure.owner
    if owner is None:
        return OwnedError(f"{files} was taken by another process: look who serves it")
    advice = f"connect to {owner.address}" if owner.address else "use it there"
    return OwnedError(
        f"{files} {how} {owner}: {advice}, stop it, or take it over "
        "(takeover=True, odq serve --takeover)",
        host=owner.host,
        pid=owner.pid,
        name=owner.name,
        address=owner.address,
    )


def _this_process(
    clock: Clock, address: str | None, name: str | None, lease_ms: int, *, opening: bool
) -> Owner:
    if not isinstance(lease_ms, int) or not MIN_LEASE_MS <= lease_ms <= MAX_LEASE_MS:
        raise InvalidInputError(
            f"owner_lease_ms is {lease_ms!r}, not within {MIN_LEASE_MS} to {MAX_LEASE_MS}"
        )
    process = ProcessIdentity.of_this_process()
    host = socket.gethostname()
    for what, text in (("name", name), ("address", address)):
        if text is not None and not (isinstance(text, str) and 0 < len(text) <= _LONGEST_NAME):
            raise InvalidInputError(f"{what} is {text!r}, not 1 to {_LONGEST_NAME} characters")
    return Owner(
        holder=secrets.token_hex(16),
        name=name or f"{host}.{process.pid}",
        host=host,
        machine=process.machine,
        pid=process.pid,
        process_start=process.start,
        address=address,
        lease_ms=lease_ms,
        taken_at=clock.now_ms(),
        opening=opening,
    )
