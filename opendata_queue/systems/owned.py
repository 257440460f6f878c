"""The parts of a root that one process owns: opened together, connected, closed in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

from opendata_queue.log.all_shards import AllMessages
from opendata_queue.log.owners_shard import bring_in_owners_shard
from opendata_queue.log.readers import ShardReaders
from opendata_queue.log.writer import MessageShard, PublishOptions
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import FencedError
from opendata_queue.model.figures import Figure
from opendata_queue.model.ids import OWNERS_SHARD, SEQUENCE_MASK
from opendata_queue.queues.store import QueueStore, open_queues
from opendata_queue.root.clock import RootClock
from opendata_queue.root.descriptor import SystemDescriptor, open_root, require_features
from opendata_queue.root.features import KNOWN_FEATURES
from opendata_queue.root.owner_files import ALL_ROLES, QUEUES_ROLE, messages_role
from opendata_queue.root.owner_watch import Vacancy
from opendata_queue.root.ownership import Ownership
from opendata_queue.root.timekeeping import continued_clock, last_root_time, said
from opendata_queue.routing.replay import LogReplay
from opendata_queue.routing.router import Router, retention_deadline
from opendata_queue.routing.shards import Following
from opendata_queue.routing.tailer import Tailer
from opendata_queue.runtime.aio import to_its_end
from opendata_queue.store import Database, Objects, StoreSettings
from opendata_queue.store.group_commit import CommitLimits

_LAST_ROUTES_MS: Final = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerOptions:
    """How a root is opened by its owner. ``Engine.open`` says what each of them means."""

    settings: StoreSettings
    publishing: PublishOptions
    queue_limits: CommitLimits | None
    machine: Clock
    lease_grace_ms: int
    takeover: bool | Vacancy
    address: str | None
    name: str | None
    owner_lease_ms: int
    publishes: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedStores:
    """What an owner has open, for work in the background."""

    objects: Objects
    queues: QueueStore
    shards: Mapping[int, MessageShard]
    """Those that it writes, by their numbers."""

    readers: ShardReaders
    """Of shards that others write, or have written."""

    routed_up_to: Callable[[int], int]
    """Up to which sequence the log of a shard is routed."""

    followed: Callable[[], list[int]]
    """The live shards that are routed here, and that others write."""


class OwnedRoot:
    """A root with all its parts open in this process.

    If another process takes it over, its parts take no more calls.
    """

    def __init__(
        self,
        descriptor: SystemDescriptor,
        objects: Objects,
        ownership: Ownership,
        shard: MessageShard | None,
        readers: ShardReaders,
        messages: AllMessages,
        queues: QueueStore,
        following: Following,
    ) -> None:
        self.descriptor = descriptor
        self.objects = objects
        self.ownership = ownership
        self.shard = shard
        """Stores what is published here; none if this process does not publish."""
        self.readers = readers
        self.messages = messages
        self.queues = queues
        self.following = following
        self.replay = LogReplay(messages.log, queues)
        queues.admin.on_replay = self.replay.add
        queues.refills.on_announce = messages.expect
        ownership.on_lost = self.step_down
        ownership.say_durable(QUEUES_ROLE, queues.database.durable_sequence)
        if shard is not None:
            ownership.say_durable(messages_role(OWNERS_SHARD), shard.database.durable_sequence)
        ownership.has_failed = lambda: (
            queues.committer.has_failed or (shard is not None and shard.has_failed)
        )

    @property
    def tailer(self) -> Tailer:
        """Routes what is published here."""
        assert self.following.own is not None
        return self.following.own

    @property
    def own_end(self) -> int | None:
        """Behind the last message that was published here."""
        return None if self.shard is None else self.shard.next_id & SEQUENCE_MASK

    @property
    def stores(self) -> OwnedStores:
        return OwnedStores(
            objects=self.objects,
            queues=self.queues,
            shards={} if self.shard is None else {OWNERS_SHARD: self.shard},
            readers=self.readers,
            routed_up_to=lambda shard: self.following.cursors().get(shard, 0),
            followed=lambda: self.following.followed,
        )

    def figures(self) -> Iterator[Figure]:
        """How commits and requests to the store have fared."""
        if self.shard is not None:
            yield from self.shard.figures()
        yield from self.queues.committer.figures()
        yield from self.objects.figures()

    @property
    def troubles(self) -> list[str]:
        """What is wrong, for people, though all is served."""
        databases = [] if self.shard is None else [self.shard.database]
        databases.append(self.queues.database)
        return [one.trouble for one in databases if one.trouble is not None]

    # --- opening ----------------------------------------------------------------------------------

    @classmethod
    async def open(cls, url: str, how: OwnerOptions) -> Self:
        objects = Objects.open(url, how.settings)
        descriptor = await open_root(objects, how.machine)
        # Before there is a new owner: what earlier ones have left is removed by it.
        known = await last_root_time(objects)
        ownership = await Ownership.acquire(
            objects,
            ALL_ROLES if how.publishes else (QUEUES_ROLE,),
            clock=how.machine,
            takeover=how.takeover,
            address=how.address,
            name=how.name,
            lease_ms=how.owner_lease_ms,
            opening=True,
            root=known,
        )
        try:
            # Now that it is ours: an open that is refused must not lock older releases out.
            descriptor = await require_features(objects, descriptor, KNOWN_FEATURES)
        except BaseException:
            await ownership.release()
            raise
        # At the same time as the messages: on S3 each of the two takes some twenty requests, one
        # after the other.
        opening_queues = asyncio.create_task(
            open_queues(objects, acknowledged=ownership.acknowledged(QUEUES_ROLE)),
            name="open the queues",
        )
        try:
            clock = await continued_clock(objects, how.machine, known, ownership.owner_path)
            shard = await _open_own_shard(objects, ownership, clock, how)
            opened = await cls._open_rest(
                objects, descriptor, ownership, clock, shard, opening_queues, how
            )
        except BaseException:
            try:
                await to_its_end(_close_when_open(opening_queues))
            finally:
                await ownership.release()
            raise
        try:
            # An owner that was taken over while it opened has fenced its successor, and must give
            # way.
            await ownership.check()
            await ownership.opened(partial(said, clock))
        except BaseException:
            await opened.close()
            raise
        return opened

    @classmethod
    async def _open_rest(
        cls,
        objects: Objects,
        descriptor: SystemDescriptor,
        ownership: Ownership,
        clock: RootClock,
        shard: MessageShard | None,
        opening_queues: asyncio.Task[Database],
        how: OwnerOptions,
    ) -> Self:
        readers = ShardReaders(objects, clock)
        messages = AllMessages(
            shard, OWNERS_SHARD, readers, clock, ahead_bytes=how.publishing.ahead_bytes
        )
        queues: QueueStore | None = None
        following: Following | None = None
        try:
            queues = await QueueStore.load(
                await opening_queues,
                clock,
                _Deadlines(messages),
                limits=how.queue_limits,
                lease_grace_ms=how.lease_grace_ms,
                ttl_grace_ms=objects.settings.ttl_grace_ms,
            )
            own = None if shard is None else await _follow_own(shard, queues)
            following = Following(objects, queues, readers, own)
            await following.start()
        except BaseException:
            if shard is not None:
                await shard.close()
            if following is not None:
                await following.close()
            await readers.close()
            if queues is not None:
                await queues.close()
            raise
        return cls(descriptor, objects, ownership, shard, readers, messages, queues, following)

    # --- closing ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Make durable what is under way, and give up the root."""
        try:
            if self.shard is not None:
                await self.shard.close()
                await self._route_the_rest()
        finally:
            await self.following.close()
            await self.replay.close()
            await self.messages.close()
            await self.readers.close()
            try:
                await self.queues.close()
            finally:
                await self.ownership.release()

    async def _route_the_rest(self) -> None:
        """Let readers find what was published in its queues.

        It is no promise: what is not routed now will be, after the next open.
        """
        # An error that has stopped the routing is logged by the tailer when it is closed.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LAST_ROUTES_MS / 1000):
                await self.tailer.caught_up(self.own_end)

    def step_down(self, error: FencedError) -> None:
        """Take no more calls: another process serves the root."""
        if self.shard is not None:
            self.shard.step_down(error)
        self.queues.committer.give_up(error)


async def _open_own_shard(
    objects: Objects, ownership: Ownership, clock: RootClock, how: OwnerOptions
) -> MessageShard | None:
    """The shard for what is published here; none, but all of it readable, if others publish."""
    if not how.publishes:
        await bring_in_owners_shard(
            objects,
            how.machine,
            takeover=how.takeover is True,
            name=how.name,
            lease_ms=how.owner_lease_ms,
        )
        return None
    return await MessageShard.open(
        objects,
        OWNERS_SHARD,
        clock=clock,
        options=how.publishing,
        journaled=True,
        acknowledged=ownership.acknowledged(messages_role(OWNERS_SHARD)),
    )


async def _close_when_open(opening: asyncio.Task[Database]) -> None:
    """Close a database that is open, or about to be: the rest could not be opened."""
    opening.cancel()
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close()


async def _follow_own(shard: MessageShard, queues: QueueStore) -> tuple[int, Tailer]:
    """Route what is published here, from where it was left."""
    cursor: int | None = shard.next_id & SEQUENCE_MASK
    if queues.names():
        cursor = await queues.cursor(OWNERS_SHARD)
    queues.ledger.starts_at(shard.next_id)
    router = Router(queues, OWNERS_SHARD, cursor or 0, always_remember=False)
    tailer = Tailer(shard.log, router)
    shard.on_durable = tailer.hand_over
    return OWNERS_SHARD, tailer


class _Deadlines:
    """Reads when messages expire."""

    def __init__(self, messages: AllMessages) -> None:
        self._messages = messages

    async def __call__(self, message_ids: Iterable[int]) -> dict[int, int]:
        ids = list(message_ids)
        found = await self._messages.metadata(ids)
        # Without metadata there is no message any more: it expired before all others.
        return {
            one: retention_deadline(found[one].received_at, found[one].retention_seconds)
            if one in found
            else 1
            for one in ids
        }
