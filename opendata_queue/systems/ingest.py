"""One process of several that publish to a root, each into a live shard of its own (RFC 0008)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NoReturn, Self

from odq_encodings import MessageMetadata
from opendata_queue.api.operation import Operation
from opendata_queue.api.system import AsyncSystem
from opendata_queue.log.writer import MessageShard, PublishOptions
from opendata_queue.model.allowance import Allowance, read_within
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import FencedError
from opendata_queue.model.figures import Figure
from opendata_queue.model.ids import SEQUENCE_BITS
from opendata_queue.model.messages import (
    MessageFields,
    NewMessage,
    StoredMessage,
)
from opendata_queue.queues.views import stored
from opendata_queue.root.descriptor import SystemDescriptor, open_root, require_features
from opendata_queue.root.features import CHECKED_BLOBS, PROVABLE_COMMITS
from opendata_queue.root.owner_files import DEFAULT_LEASE_MS, messages_role
from opendata_queue.root.ownership import Ownership
from opendata_queue.root.roles import queues_are_elsewhere, take_live_shard
from opendata_queue.root.timekeeping import continued_clock, follow_root, last_root_time, said
from opendata_queue.runtime.background import BackgroundTasks
from opendata_queue.store import Objects, StoreSettings

_NEEDED: Final = frozenset({PROVABLE_COMMITS})


class Ingest(AsyncSystem):
    """Publishes, and reads back what was published here; queues are the business of others.

    What it acknowledges is durable, whether or not the queues are served: it is routed when they
    are.
    """

    def __init__(
        self,
        descriptor: SystemDescriptor,
        objects: Objects,
        shard_number: int,
        shard: MessageShard,
        ownership: Ownership,
    ) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.shard_number = shard_number
        self._objects = objects
        self._shard = shard
        self._ownership = ownership
        self.on_lost: Callable[[FencedError], None] | None = None
        """Called when another process writes this shard, even if there are no calls."""
        ownership.on_lost = self._step_down
        ownership.has_failed = lambda: shard.has_failed
        ownership.say_durable(messages_role(shard_number), shard.database.durable_sequence)
        self._closing: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        settings: StoreSettings | None = None,
        options: PublishOptions | None = None,
        clock: Clock | None = None,
        address: str | None = None,
        name: str | None = None,
        owner_lease_ms: int = DEFAULT_LEASE_MS,
    ) -> Self:
        """Become a publisher of the root at ``url``; any number may be that at once.

        It goes on with the shard of a publisher that is gone. Of those on other machines it waits
        for a sign of life, for as long as their ``owner_lease_ms``.
        """
        machine = machine_clock(clock)
        objects = Objects.open(url, settings or StoreSettings())
        descriptor = await open_root(objects, machine)
        known = await last_root_time(objects)
        number, ownership = await take_live_shard(
            objects, machine, address=address, name=name, lease_ms=owner_lease_ms, root=known
        )
        try:
            descriptor = await require_features(objects, descriptor, _NEEDED)
            root = await continued_clock(objects, machine, known, ownership.owner_path)
            shard = await MessageShard.open(
                objects,
                number,
                clock=root,
                options=options or PublishOptions(),
                # Not in a root of 0.1, whose owner may be of that release still.
                checked_blobs=CHECKED_BLOBS in descriptor.features,
                acknowledged=ownership.acknowledged(messages_role(number)),
            )
        except BaseException:
            await ownership.release()
            raise
        opened = cls(descriptor, objects, number, shard, ownership)
        try:
            # Who was taken over while it opened has fenced its successor, and must give way.
            await asyncio.gather(ownership.check(), ownership.opened(partial(said, root)))
        except BaseException:
            await opened.close()
            raise
        opened.run_beside(follow_root(objects, root, known, ownership.heartbeat_path))
        return opened

    # --- publishing and reading -------------------------------------------------------------------

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        return await self._shard.publish_many(messages)

    async def publish_once(self, messages: Sequence[NewMessage], key: str) -> list[int]:
        """As ``Engine.publish_once``. Keys are known to this shard alone: try again here."""
        return await self._shard.publish_once(messages, key)

    async def knows(self, messages: Sequence[NewMessage], key: str | None) -> bool:
        """Whether these messages were published here under their keys, or under one for all."""
        return await self._shard.knows(messages, key)

    async def read_many(self, message_ids: Iterable[int]) -> list[StoredMessage | None]:
        """Messages that were published here; none for those of other shards."""
        ids = list(message_ids)
        return self._own(ids, await self._shard.read_many(ids))

    async def read_within(
        self, message_ids: list[int], within: Allowance
    ) -> list[StoredMessage | None]:
        """The first of them, as many as fit."""
        found = await read_within(self._shard.read_many, message_ids, within)
        return self._own(message_ids[: len(found)], found)

    def _own(self, ids: list[int], found: list[MessageFields | None]) -> list[StoredMessage | None]:
        mine = self.shard_number
        return [
            stored(m) if one >> SEQUENCE_BITS == mine else None
            for one, m in zip(ids, found, strict=True)
        ]

    def scan_log(
        self, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncIterator[list[MessageMetadata]]:
        """The metadata of all messages of this shard, in the order of publishing."""
        return self._shard.log.scan(from_sequence, limit=limit)

    def figures(self) -> Iterator[Figure]:
        """How commits and requests to the store have fared."""
        yield from self._shard.figures()
        yield from self._objects.figures()
        yield from self._background.figures()

    @property
    def troubles(self) -> list[str]:
        """As ``Engine.troubles``."""
        trouble = self._shard.database.trouble
        return [] if trouble is None else [trouble]

    # --- in the background ------------------------------------------------------------------------

    @property
    def shard(self) -> MessageShard:
        """For what maintains the store, like the retention compactor."""
        return self._shard

    def run_beside(
        self,
        work: Coroutine[Any, Any, None],
        figures: Callable[[], Iterable[Figure]] | None = None,
    ) -> None:
        """As ``Engine.run_beside``."""
        self._background.run(work, figures)

    # --- closing ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Make durable what is under way, and leave the shard to the next publisher."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._background.close()
        await self._let_go()
        try:
            await self._shard.close()
        finally:
            await self._ownership.release()

    def _step_down(self, error: FencedError) -> None:
        self._shard.step_down(error)
        if self.on_lost is not None:
            self.on_lost(error)

    # --- what others do ---------------------------------------------------------------------------

    async def _perform(self, operation: Operation, arguments: dict[str, Any]) -> NoReturn:
        raise await queues_are_elsewhere(self._objects)
