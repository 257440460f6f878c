"""Taking the roles of a root, keeping them, and giving them up (RFC 0007).

SlateDB's fencing keeps the data safe whatever happens here. This module sees to it that no owner is
fenced by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Final, Self

from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import (
    FencedError,
    InvalidInputError,
    OdqError,
    StoreUnavailableError,
)
from opendata_queue.root.owner_files import (
    ALL_ROLES,
    DEFAULT_LEASE_MS,
    MAX_LEASE_MS,
    MIN_LEASE_MS,
    Heartbeat,
    Owner,
    OwnerFiles,
    Release,
    RootTime,
)
from opendata_queue.root.owner_watch import (
    Before,
    Vacancy,
    Verdict,
    epoch_at_turn,
    epochs_before,
    held_here,
    judge,
    refusal,
)
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.runtime.process import ProcessIdentity
from opendata_queue.store import Objects

logger = logging.getLogger(__name__)

_BEATS_PER_LEASE: Final = 3
_RELEASE_TIMEOUT_MS: Final = 5_000
_TRIES: Final = 100
_LONGEST_NAME: Final = 255


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
        self.heartbeats = 0
        """How many were begun."""
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
        held_here[owner.holder] = taken
        try:
            if takeover is True:
                await taken._take_over()
            else:
                befores = await epochs_before(files, clock, takeover)
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
        await self._check_for_others()
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
                raise refusal(files, tenure)
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
                    before = await epoch_at_turn(one, self._clock, raced=raced)
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
        self.heartbeats += 1
        now = self._clock.now_ms()
        heartbeat = Heartbeat(
            holder=self.owner.holder,
            count=self.heartbeats,
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
                await self._check_for_others()
        except (OdqError, TimeoutError) as error:
            logger.info("could not check for other owners: %s", str(error) or "no answer")

    async def _check_for_others(self) -> None:
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
