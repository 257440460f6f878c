"""One process that owns a root and does everything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Final, NoReturn, Self, cast

from odq_encodings import MessageMetadata
from opendata_queue.api.system import AsyncSystem
from opendata_queue.filters import Filter
from opendata_queue.log.all_shards import AllMessages
from opendata_queue.log.owners_shard import bring_in_owners_shard
from opendata_queue.log.readers import ShardReaders
from opendata_queue.log.writer import MessageShard, PublishOptions
from opendata_queue.model.allowance import Allowance
from opendata_queue.model.checks import check_integer
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import CorruptStoreError, FencedError, InvalidInputError
from opendata_queue.model.figures import Figure
from opendata_queue.model.ids import MAX_MESSAGE_ID, OWNERS_SHARD, SEQUENCE_MASK
from opendata_queue.model.messages import (
    ClaimedMessage,
    MessageFields,
    NewMessage,
    PeekedMessage,
    StoredMessage,
)
from opendata_queue.model.options import QueueOptions, check_name
from opendata_queue.model.values import (
    BrowsedState,
    FailedMessage,
    FoundPage,
    MessageHistory,
    Outcome,
    QueueInfo,
    QueuePage,
    QueueStats,
    Start,
)
from opendata_queue.queues.dead_letters import DeadLetters
from opendata_queue.queues.lanes import Past
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.receipts import HeldMessage, Receipts
from opendata_queue.queues.state import Claim, Held
from opendata_queue.queues.store import MAX_WAIT_MS, QueueStore, open_queues
from opendata_queue.queues.views import given_filter, satisfying
from opendata_queue.root.clock import RootClock
from opendata_queue.root.descriptor import SystemDescriptor, open_root, require_features
from opendata_queue.root.features import KNOWN_FEATURES
from opendata_queue.root.owner_files import ALL_ROLES, DEFAULT_LEASE_MS, QUEUES_ROLE, messages_role
from opendata_queue.root.owner_watch import Vacancy
from opendata_queue.root.ownership import Ownership
from opendata_queue.root.roles import publishing_is_elsewhere
from opendata_queue.root.timekeeping import continued_clock, last_root_time, said
from opendata_queue.routing.replay import FROM_THE_BEGINNING_MS, LogReplay
from opendata_queue.routing.router import Router, retention_deadline
from opendata_queue.routing.shards import Following
from opendata_queue.routing.tailer import Tailer
from opendata_queue.runtime.aio import to_its_end
from opendata_queue.runtime.background import BackgroundTasks
from opendata_queue.store import Database, Objects, StoreSettings
from opendata_queue.store.group_commit import CommitLimits
from opendata_queue.systems.finding import Wanted
from opendata_queue.systems.reading import RootReading, check_count, checked_failed

MAX_FAILED_AT_ONCE: Final = 10_000

_LAST_ROUTES_MS: Final = 1_000


logger = logging.getLogger(__name__)

_Read = MessageFields | CorruptStoreError | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedStores:
    """What an owner has open, for work that is done beside that of its callers."""

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


class Engine(AsyncSystem):
    """A system in this process, the one owner of its root.

    If another process takes the root over, every call here raises ``FencedError`` from then on.
    """

    def __init__(
        self,
        descriptor: SystemDescriptor,
        shard: MessageShard | None,
        queues: QueueStore,
        readers: ShardReaders,
        messages: AllMessages,
        following: Following,
        ownership: Ownership,
        objects: Objects,
    ) -> None:
        super().__init__()
        self.descriptor = descriptor
        self._objects = objects
        self._own = shard
        self._queues = queues
        self._readers = readers
        self._messages = messages
        self._following = following
        self._dead_letters = DeadLetters(queues)
        self._reading = RootReading(queues, messages, until_routed=following.caught_up_with)
        self._replay = LogReplay(messages.log, queues)
        queues.admin.on_replay = self._replay.add
        queues.refills.on_announce = messages.expect
        self._ownership = ownership
        ownership.on_lost = self._step_down
        self.on_lost: Callable[[FencedError], None] | None = None
        """Told when another process serves the root, even if nobody calls."""
        ownership.say_durable(QUEUES_ROLE, queues.database.durable_sequence)
        if shard is not None:
            ownership.say_durable(messages_role(OWNERS_SHARD), shard.database.durable_sequence)
        ownership.has_failed = lambda: (
            queues.committer.has_failed or (shard is not None and shard.has_failed)
        )
        self._receipts = Receipts(descriptor.secret_bytes)
        self.consumer_id = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._closing: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()

    @property
    def _shard(self) -> MessageShard:
        """What stores the messages that are published here."""
        assert self._own is not None
        return self._own

    @property
    def _tailer(self) -> Tailer:
        """What routes the messages that are published here."""
        assert self._following.own is not None
        return self._following.own

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        settings: StoreSettings | None = None,
        options: PublishOptions | None = None,
        queue_limits: CommitLimits | None = None,
        clock: Clock | None = None,
        lease_grace_ms: int = 0,
        takeover: bool | Vacancy = False,
        address: str | None = None,
        name: str | None = None,
        owner_lease_ms: int = DEFAULT_LEASE_MS,
        publishes: bool = True,
    ) -> Self:
        """Open the root at ``url`` (``memory:///``, ``file:///path`` or ``s3://bucket/prefix``).

        A root that is not there yet is made. S3 is configured as for other AWS tools:
        ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY`` and ``AWS_REGION``, or ``AWS_PROFILE``, and
        for other services than Amazon's ``AWS_ENDPOINT_URL``.

        ``options`` are about publishing, and ``queue_limits`` about the commits of claims, acks
        and all else that queues do.

        ``lease_grace_ms`` is how long after its end a lease is taken back, for consumers that
        reckon with another clock.

        A root that another process serves is refused with ``OwnedError``, which names it, unless
        ``takeover`` says that it shall be taken from it. An owner that was killed on this machine
        is known to be gone. Of one on another machine this waits for a sign of life, for as long
        as its ``owner_lease_ms``; a standby takes over from an owner that is silent for so long.
        ``address`` is the URL at which this process serves, for clients that know the root, and
        ``name`` how it is called in the errors of others.

        An engine that does not itself publish (``publishes=False``) serves the queues alone, and
        routes what other processes publish (``Ingest``).
        """
        machine = machine_clock(clock)
        objects = Objects.open(url, settings or StoreSettings())
        descriptor = await open_root(objects, machine)
        # Before there is a new owner: what earlier ones have left is removed by it.
        known = await last_root_time(objects)
        ownership = await Ownership.acquire(
            objects,
            ALL_ROLES if publishes else (QUEUES_ROLE,),
            clock=machine,
            takeover=takeover,
            address=address,
            name=name,
            lease_ms=owner_lease_ms,
            opening=True,
            root=known,
        )
        try:
            # Now that it is ours: an open that is refused must not lock older releases out.
            descriptor = await require_features(objects, descriptor, KNOWN_FEATURES)
        except BaseException:
            await ownership.release()
            raise
        # Beside the messages: on S3 each of them takes some twenty requests, one after the other.
        opening_queues = asyncio.create_task(
            open_queues(objects, acknowledged=ownership.acknowledged(QUEUES_ROLE)),
            name="open the queues",
        )
        try:
            shard = None
            options = options or PublishOptions()
            root = await continued_clock(objects, machine, known, ownership.owner_path)
            if not publishes:
                await bring_in_owners_shard(
                    objects, machine, takeover=takeover is True, name=name, lease_ms=owner_lease_ms
                )
            else:
                shard = await MessageShard.open(
                    objects,
                    OWNERS_SHARD,
                    clock=root,
                    options=options,
                    journaled=True,
                    acknowledged=ownership.acknowledged(messages_role(OWNERS_SHARD)),
                )
            opened = await cls._open_owned(
                objects,
                descriptor,
                ownership,
                root,
                shard,
                opening_queues,
                ahead_bytes=options.ahead_bytes,
                queue_limits=queue_limits,
                lease_grace_ms=lease_grace_ms,
            )
        except BaseException:
            try:
                await to_its_end(_close_when_open(opening_queues))
            finally:
                await ownership.release()
            raise
        try:
            # Who was taken over while it opened has fenced its successor, and must give way.
            await ownership.check()
            await ownership.opened(partial(said, root))
        except BaseException:
            await opened.close()
            raise
        return opened

    @classmethod
    async def _open_owned(
        cls,
        objects: Objects,
        descriptor: SystemDescriptor,
        ownership: Ownership,
        clock: RootClock,
        shard: MessageShard | None,
        opening_queues: asyncio.Task[Database],
        *,
        ahead_bytes: int,
        queue_limits: CommitLimits | None,
        lease_grace_ms: int,
    ) -> Self:
        readers = ShardReaders(objects, clock)
        messages = AllMessages(shard, OWNERS_SHARD, readers, clock, ahead_bytes=ahead_bytes)
        queues: QueueStore | None = None
        following: Following | None = None
        try:
            queues = await QueueStore.load(
                await opening_queues,
                clock,
                _Deadlines(messages),
                limits=queue_limits,
                lease_grace_ms=lease_grace_ms,
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
        return cls(descriptor, shard, queues, readers, messages, following, ownership, objects)

    # --- publishing and reading -------------------------------------------------------------------

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        self._queues.turns.called()
        return await (self._own or await self._no_shard()).publish_many(messages)

    async def _no_shard(self) -> NoReturn:
        raise await publishing_is_elsewhere(self._objects)

    async def publish_once(self, messages: Sequence[NewMessage], key: str) -> list[int]:
        """Publish messages, all of them or none, and only the first time that ``key`` is given.

        They have no keys of their own; the namespace is that of the first one.
        """
        self._queues.turns.called()
        return await (self._own or await self._no_shard()).publish_once(messages, key)

    async def read_many(self, message_ids: Iterable[int]) -> list[StoredMessage | None]:
        self._queues.turns.called()
        return await self._reading.read_many(list(message_ids))

    async def read_within(
        self, message_ids: list[int], within: Allowance
    ) -> list[StoredMessage | None]:
        """The first of them, as many as fit."""
        self._queues.turns.called()
        return await self._reading.read_within(message_ids, within)

    def scan_log(
        self, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncIterator[list[MessageMetadata]]:
        """The metadata of all messages in the order of publishing, in chunks of up to 1,000.

        Those whose retention is over are there until their space is freed.
        """
        if not isinstance(from_sequence, int) or from_sequence < 0:
            raise InvalidInputError(f"from_sequence is {from_sequence!r}, not 0 or more")
        return self._messages.log(OWNERS_SHARD).scan(from_sequence, limit=limit)

    # --- queues -----------------------------------------------------------------------------------

    async def create_queue(
        self,
        name: str,
        *,
        filter: str = "",
        options: QueueOptions | None = None,
        start: Start = "now",
    ) -> QueueInfo:
        check_name(name)
        parsed = await given_filter(filter)
        if options is None:
            options = QueueOptions()
        elif not isinstance(options, QueueOptions):
            raise InvalidInputError(f"options are {options!r}, not QueueOptions")
        return await self._create_queue(name, parsed, options, self._replay_from(start))

    async def create_queue_after_others(self, name: str, *, filter: str) -> QueueInfo:
        """Make a queue from now on, and for what other processes have published before.

        They can make no queues: what they took in for one that is yet to be made waits in their
        logs. What was published here, and in bulk, is not gone through.
        """
        check_name(name)
        return await self._create_queue(
            name,
            await given_filter(filter),
            QueueOptions(),
            FROM_THE_BEGINNING_MS,
            replayed=self._following.cursors_of_others,
        )

    async def _create_queue(
        self,
        name: str,
        filter: Filter,
        options: QueueOptions,
        replay_from_ms: int | None,
        *,
        replayed: Callable[[], Mapping[int, int]] | None = None,
    ) -> QueueInfo:
        self._queues.admin.check_free(name)  # before anything that takes its time
        # Whatever was published before this call is in the past of this queue.
        await self._all_is_routed()
        await self._queues.admin.create(
            name,
            filter,
            options,
            self._following.cursors,
            replay_from_ms=replay_from_ms,
            replayed=replayed,
        )
        return await self.get_queue(name)

    def _replay_from(self, start: Start) -> int | None:
        """From when on what is in the log is for a new queue; none if nothing is."""
        if start == "now":
            return None
        if start == "beginning":
            return FROM_THE_BEGINNING_MS
        if not isinstance(start, int) or isinstance(start, bool):
            raise InvalidInputError(
                f"start is {start!r}, not 'now', 'beginning' or a time in milliseconds"
            )
        clock = self._queues.clock
        now, ahead_ms = clock.now_ms(), clock.ahead_for_callers_ms()
        if not FROM_THE_BEGINNING_MS <= start <= now - ahead_ms:
            raise InvalidInputError(
                f"start is {start}, which is no time of the past; now is {now - ahead_ms}"
            )
        return max(start + ahead_ms, FROM_THE_BEGINNING_MS)

    async def _all_is_routed(self) -> None:
        """Wait until everything that has been published is in its queues."""
        await self._following.all_caught_up(self._own_end)

    @property
    def _own_end(self) -> int | None:
        """Behind the last message that was published here."""
        return None if self._own is None else self._own.next_id & SEQUENCE_MASK

    async def update_queue(
        self, name: str, *, filter: str | None = None, **options: Any
    ) -> QueueInfo:
        parsed = None
        if filter is not None:
            parsed = await given_filter(filter, unless=self._queues.queue(name).filter)
            self._queues.queue(name).options.with_changes(options)  # before what takes its time
            # Whatever was published before this call is for the filter that there was then.
            await self._all_is_routed()
        await self._queues.admin.update(name, filter=parsed, changes=options)
        return await self.get_queue(name)

    async def purge_queue(self, name: str) -> int:
        self._queues.queue(name)
        await self._all_is_routed()
        async with self._following.bulk.paused():
            return await self._queues.admin.purge(name, Past(self._following.cursors()))

    async def delete_queue(self, name: str) -> None:
        await self._queues.admin.delete(name)

    async def get_queue(self, name: str) -> QueueInfo:
        self._queues.committer.check_open()
        return self._queues.queue(name).info()

    async def list_queues(
        self, *, prefix: str = "", after: str = "", limit: int | None = None
    ) -> list[str]:
        self._queues.committer.check_open()
        return self._queues.names(prefix, after, limit)

    def count_queues(self, namespace: str | None = None) -> int:
        """How many queues there are, or in one namespace, without a look at each."""
        return self._queues.count(namespace)

    async def stats(self, name: str) -> QueueStats:
        self._queues.turns.called()
        self._queues.committer.check_open()
        await self._following.own_is_routed()
        return await self._reading.stats(name)

    # --- looking into queues ----------------------------------------------------------------------

    async def peek(
        self, name: str, count: int = 1, *, within: Allowance | None = None
    ) -> list[PeekedMessage]:
        self._queues.turns.called()
        check_count("count", count)
        self._following.check_running()
        await self._following.own_is_routed()
        return await self._reading.peek(name, count, within=within)

    async def browse(
        self, name: str, state: BrowsedState, *, after: str | None = None, limit: int = 100
    ) -> QueuePage:
        self._queues.turns.called()
        check_count("limit", limit)
        await self._following.own_is_routed()
        return await self._reading.browse(name, state, after=after, limit=limit)

    async def find(
        self,
        name: str,
        state: BrowsedState,
        *,
        filter: str | None = None,
        error: str | None = None,
        consumer: str | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> FoundPage:
        self._queues.turns.called()
        check_count("limit", limit)
        wanted = await Wanted.checked(state, filter, error, consumer, since_ms, until_ms)
        await self._following.own_is_routed()
        return await self._reading.find(name, wanted, after=after, limit=limit)

    async def history(self, message_id: int) -> MessageHistory | None:
        self._queues.turns.called()
        return await self._reading.history(message_id)

    # --- consuming --------------------------------------------------------------------------------

    async def claim(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str | None = None,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        within: Allowance | None = None,
    ) -> list[ClaimedMessage]:
        """See ``AsyncSystem``. What does not fit ``within`` some bytes is given back at once."""
        self._queues.turns.called()
        self._following.check_running()
        queue = self._queues.queue(name)
        if queue.replays:
            self._replay.check_running()
        clock = self._queues.clock
        check_integer("wait_ms", wait_ms, 0, MAX_WAIT_MS)
        give_up_at = clock.now_ms() + wait_ms
        # Whoever can be served need not wait for all that busy producers bring.
        await self._following.own_is_routed(patient=not queue.state.claimable)
        consumer = self.consumer_id if consumer is None else consumer
        while True:
            claimed, all_gone = await self._claim_some(
                queue, count, consumer, lease_ms, wait_ms, within
            )
            if not all_gone:
                return claimed
            # Others may be behind them, or come while there is time.
            wait_ms = max(0, give_up_at - clock.now_ms())

    async def _claim_some(
        self,
        queue: StoredQueue,
        count: int,
        consumer: str,
        lease_ms: int | None,
        wait_ms: int,
        within: Allowance | None,
    ) -> tuple[list[ClaimedMessage], bool]:
        """What was claimed, and whether there was something, and all of it is gone."""
        name = queue.name
        held, durable = await self._queues.consumers.claim(
            name, count, consumer=consumer, lease_ms=lease_ms, wait_ms=wait_ms
        )
        if not held:
            # Whoever asks again and again must not keep everybody else from running.
            await asyncio.sleep(0)
            return [], False
        try:
            # While the claim becomes durable.
            messages = await self._read_claimed([one.message_id for one in held], within)
            fitting = held if within is None else held[: len(messages)]
            claimed, gone, broken = self._claimed(queue, fitting, messages)
            await durable()
            queue.check()
            if len(fitting) < len(held):
                await self._queues.consumers.release(name, held[len(fitting) :])
            if gone:  # past their retention, and dropped by the store before us
                await self._queues.consumers.drop_gone(name, gone)
            for claim, error in broken:
                # It rests like what fails, and is a dead letter in the end.
                logger.error("message %d can't be handed out: %s", claim.message_id, error)
                await self._queues.consumers.nack(name, [claim], error=str(error), delay_ms=None)
        except BaseException:
            self._queues.consumers.give_back_unseen(queue, held)
            raise
        return claimed, 0 < len(gone) == len(fitting)

    async def _read_claimed(self, message_ids: list[int], within: Allowance | None) -> list[_Read]:
        """Messages, none for those that are gone, and what is wrong with broken ones."""
        try:
            return [*await self._messages.read_fitting(message_ids, within)]
        except CorruptStoreError:
            if within is not None:
                within.give_back()
        found: list[_Read] = []
        for message_id in message_ids:
            try:
                alone = await self._messages.read_fitting([message_id], within)
            except CorruptStoreError as error:
                found.append(error)
                continue
            if not alone:
                break
            found += alone
        return found

    def _claimed(
        self, queue: StoredQueue, held: list[Held], messages: list[_Read]
    ) -> tuple[list[ClaimedMessage], list[Claim], list[tuple[Claim, CorruptStoreError]]]:
        """What to hand out, and the claims of messages that are gone, or broken."""
        receipts = self._receipts.of(queue.queue_id, queue.created_at_ms)
        name = queue.name
        if {*map(type, messages)} == {MessageFields}:  # most often, and column by column
            _, priorities, _, deadlines, tries, _, _ = zip(*held, strict=True)
            columns = zip(*cast("list[MessageFields]", messages), strict=True)
            lease = repeat(name), priorities, tries, deadlines, held, repeat(receipts)
            return list(map(HeldMessage, *columns, *lease)), [], []
        claimed: list[ClaimedMessage] = []
        gone: list[Claim] = []
        broken: list[tuple[Claim, CorruptStoreError]] = []
        for one, message in zip(held, messages, strict=True):
            if message is None:
                gone.append(one.claim())
            elif isinstance(message, CorruptStoreError):
                broken.append((one.claim(), message))
            else:
                _, priority, _, deadline, attempts, _, _ = one
                claimed.append(
                    HeldMessage(*message, name, priority, attempts, deadline, one, receipts)
                )
        return claimed, gone, broken

    async def ack(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        self._queues.turns.called()
        return await self._queues.consumers.ack(name, self._claims(name, receipts))

    async def nack(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        error: str = "",
        delay_ms: int | None = None,
    ) -> list[Outcome]:
        self._queues.turns.called()
        claims = self._claims(name, receipts)
        return await self._queues.consumers.nack(name, claims, error=error, delay_ms=delay_ms)

    async def release(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        self._queues.turns.called()
        return await self._queues.consumers.release(name, self._claims(name, receipts))

    async def extend(
        self, name: str, *receipts: str | ClaimedMessage, lease_ms: int | None = None
    ) -> list[int | None]:
        self._queues.turns.called()
        claims = self._claims(name, receipts)
        return await self._queues.consumers.extend(name, claims, lease_ms=lease_ms)

    def _claims(self, name: str, receipts: Sequence[str | ClaimedMessage]) -> list[Claim | Held]:
        queue = self._queues.queue(name)
        return self._receipts.of(queue.queue_id, queue.created_at_ms).read(receipts)

    # --- failed messages --------------------------------------------------------------------------

    async def failed(
        self,
        name: str,
        *,
        filter: str | None = None,
        after_id: int = -1,
        limit: int = 100,
        within: Allowance | None = None,
    ) -> list[FailedMessage]:
        """See ``AsyncSystem``. With ``within`` as many as fit."""
        self._queues.turns.called()
        wanted = await checked_failed(filter, after_id, limit)
        return await self._reading.failed(
            name, wanted=wanted, after_id=after_id, limit=limit, within=within
        )

    async def replay(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = MAX_FAILED_AT_ONCE,
    ) -> list[int]:
        return await self._finish_failed(name, message_ids, all, filter, limit, again=True)

    async def purge_failed(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = MAX_FAILED_AT_ONCE,
    ) -> list[int]:
        return await self._finish_failed(name, message_ids, all, filter, limit, again=False)

    async def _finish_failed(
        self,
        name: str,
        message_ids: Sequence[int],
        every: bool,
        filter: str | None,
        limit: int,
        *,
        again: bool,
    ) -> list[int]:
        self._queues.turns.called()
        _check_choice(message_ids, every, filter)
        check_integer("limit", limit, 1, MAX_FAILED_AT_ONCE)
        if message_ids:
            return await self._dead_letters.finish(name, message_ids, again=again)
        wanted = None if filter is None else await given_filter(filter)

        async def chosen(ids: Sequence[int]) -> Sequence[int]:
            if wanted is None:
                return ids
            found: list[int] = []
            async for some, metadata in self._messages.metadata_in_steps(ids):
                found += await satisfying(wanted, some, metadata)
            return found

        return await self._dead_letters.finish_chosen(name, chosen, again=again, limit=limit)

    # --- beside -----------------------------------------------------------------------------------

    @property
    def stores(self) -> OwnedStores:
        """For those who look after what is stored, like the retention compactor."""
        return OwnedStores(
            objects=self._objects,
            queues=self._queues,
            shards={} if self._own is None else {OWNERS_SHARD: self._own},
            readers=self._readers,
            routed_up_to=lambda shard: self._following.cursors().get(shard, 0),
            followed=lambda: self._following.followed,
        )

    def run_beside(
        self,
        work: Coroutine[Any, Any, None],
        figures: Callable[[], Iterable[Figure]] | None = None,
    ) -> None:
        """Let something go on until this is closed, which cancels it before anything else ends.

        Its ``figures`` are shown with those of the engine.
        """
        self._background.run(work, figures)

    async def all_is_routed(self) -> None:
        """Wait until everything that has been published is in its queues."""
        await self._all_is_routed()

    def figures(self) -> Iterator[Figure]:
        """How commits and requests to the store have fared, for those who run this process."""
        if self._own is not None:
            yield from self._own.figures()
        yield from self._queues.committer.figures()
        yield from self._objects.figures()
        yield from self._background.figures()

    @property
    def troubles(self) -> list[str]:
        """What is wrong, for people, though all is served."""
        databases = [] if self._own is None else [self._own.database]
        databases.append(self._queues.database)
        return [one.trouble for one in databases if one.trouble is not None]

    # --- closing ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop workers, make durable what is under way, and give up the root.

        Closing twice does nothing. A caller that is cancelled does not stop it half-way.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._background.close()
        await self._let_go()
        try:
            if self._own is not None:
                await self._own.close()
                await self._route_the_rest()
        finally:
            await self._following.close()
            await self._replay.close()
            await self._messages.close()
            await self._readers.close()
            try:
                await self._queues.close()
            finally:
                await self._ownership.release()

    async def _route_the_rest(self) -> None:
        """Let those who only look find what was published in its queues.

        It is no promise: what is not routed now will be, after the next open.
        """
        # Whatever has stopped the routing, the tailer tells when it is closed.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LAST_ROUTES_MS / 1000):
                await self._tailer.caught_up(self._own_end)

    def _step_down(self, error: FencedError) -> None:
        """Take no more calls: another process serves the root."""
        if self._own is not None:
            self._own.step_down(error)
        self._queues.committer.give_up(error)
        if self.on_lost is not None:
            self.on_lost(error)


async def _close_when_open(opening: asyncio.Task[Database]) -> None:
    """Let go of a database that may be open, or still be opened: the rest could not be."""
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
    """Looks up when messages expire."""

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


def _check_choice(message_ids: Sequence[int], every: bool, filter: str | None) -> None:
    """One way to say which messages are meant, and no more: a slip must not mean all of them."""
    given = [bool(message_ids), bool(every), filter is not None]
    if sum(given) != 1:
        raise InvalidInputError(
            f"{sum(given)} choices of failed messages were given, not 1: give message ids, "
            "all=True or a filter"
        )
    if filter is not None and not filter.strip():
        raise InvalidInputError("filter is empty, which matches everything: say all=True")
    if len(message_ids) > MAX_FAILED_AT_ONCE:
        raise InvalidInputError(
            f"{len(message_ids)} message ids are over the limit of {MAX_FAILED_AT_ONCE} in one call"
        )
    for one in message_ids:
        check_integer("message_id", one, 0, MAX_MESSAGE_ID)
