"""One process that owns a root and does everything."""

from __future__ import annotations

import asyncio
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
from typing import Any, NoReturn, Self

from odq_encodings import MessageMetadata
from opendata_queue.api.system import AsyncSystem
from opendata_queue.filters import Filter
from opendata_queue.log.writer import MessageShard, PublishOptions
from opendata_queue.model.allowance import Allowance
from opendata_queue.model.checks import check_integer
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import FencedError, InvalidInputError
from opendata_queue.model.figures import Figure
from opendata_queue.model.ids import OWNERS_SHARD
from opendata_queue.model.messages import (
    ClaimedMessage,
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
from opendata_queue.queues.lanes import Past
from opendata_queue.queues.receipts import Receipts
from opendata_queue.queues.store import MAX_WAIT_MS
from opendata_queue.queues.views import given_filter
from opendata_queue.root.owner_files import DEFAULT_LEASE_MS
from opendata_queue.root.owner_watch import Vacancy
from opendata_queue.root.roles import publishing_is_elsewhere
from opendata_queue.routing.replay import FROM_THE_BEGINNING_MS
from opendata_queue.routing.tailer import Tailer
from opendata_queue.runtime.background import BackgroundTasks
from opendata_queue.store import StoreSettings
from opendata_queue.store.group_commit import CommitLimits
from opendata_queue.systems.arguments import (
    MAX_FAILED_AT_ONCE,
    check_count,
    checked_failed,
    replay_from,
)
from opendata_queue.systems.failures import ChosenFailures
from opendata_queue.systems.finding import Wanted
from opendata_queue.systems.handing_out import HandingOut
from opendata_queue.systems.owned import OwnedRoot, OwnedStores, OwnerOptions
from opendata_queue.systems.reading import RootReading


class Engine(AsyncSystem):
    """A system in this process, the one owner of its root.

    If another process takes the root over, every call here raises ``FencedError`` from then on.
    """

    def __init__(self, parts: OwnedRoot) -> None:
        super().__init__()
        self.parts = parts
        self.descriptor = parts.descriptor
        # By their own names: calls reach them in one step.
        self._objects = parts.objects
        self._ownership = parts.ownership
        self._own = parts.shard
        self._readers = parts.readers
        self._messages = parts.messages
        self._queues = parts.queues
        self._following = parts.following
        self._replay = parts.replay
        self._handing_out = HandingOut(
            parts.queues, parts.messages, Receipts(parts.descriptor.secret_bytes)
        )
        self._reading = RootReading(
            parts.queues, parts.messages, until_routed=parts.following.caught_up_with
        )
        self._failures = ChosenFailures(parts.queues, parts.messages)
        self.on_lost: Callable[[FencedError], None] | None = None
        """Called when another process serves the root, even if there are no calls."""
        parts.ownership.on_lost = self._step_down
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
        return self.parts.tailer

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
        how = OwnerOptions(
            settings=settings or StoreSettings(),
            publishing=options or PublishOptions(),
            queue_limits=queue_limits,
            machine=machine_clock(clock),
            lease_grace_ms=lease_grace_ms,
            takeover=takeover,
            address=address,
            name=name,
            owner_lease_ms=owner_lease_ms,
            publishes=publishes,
        )
        return cls(await OwnedRoot.open(url, how))

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
        return await self._create_queue(
            name, parsed, options, replay_from(start, self._queues.clock)
        )

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
        await self.all_is_routed()
        await self._queues.admin.create(
            name,
            filter,
            options,
            self._following.cursors,
            replay_from_ms=replay_from_ms,
            replayed=replayed,
        )
        return await self.get_queue(name)

    async def update_queue(
        self, name: str, *, filter: str | None = None, **options: Any
    ) -> QueueInfo:
        parsed = None
        if filter is not None:
            parsed = await given_filter(filter, unless=self._queues.queue(name).filter)
            self._queues.queue(name).options.with_changes(options)  # before what takes its time
            # Whatever was published before this call is for the filter that there was then.
            await self.all_is_routed()
        await self._queues.admin.update(name, filter=parsed, changes=options)
        return await self.get_queue(name)

    async def purge_queue(self, name: str) -> int:
        self._queues.queue(name)
        await self.all_is_routed()
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
        """How many queues there are, or in one namespace, without going through them."""
        return self._queues.count(namespace)

    async def stats(self, name: str) -> QueueStats:
        self._queues.turns.called()
        self._queues.committer.check_open()
        await self._following.own_is_routed()
        return await self._reading.stats(name)

    # --- what queues hold -------------------------------------------------------------------------

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
        # A consumer that can be served need not wait for all that busy producers bring.
        await self._following.own_is_routed(patient=not queue.state.claimable)
        consumer = self.consumer_id if consumer is None else consumer
        while True:
            claimed, all_gone = await self._handing_out.claim(
                queue, count, consumer, lease_ms, wait_ms, within
            )
            if not all_gone:
                return claimed
            # Others may be behind them, or come while there is time.
            wait_ms = max(0, give_up_at - clock.now_ms())

    async def ack(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        self._queues.turns.called()
        return await self._queues.consumers.ack(name, self._handing_out.claims_of(name, receipts))

    async def nack(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        error: str = "",
        delay_ms: int | None = None,
    ) -> list[Outcome]:
        self._queues.turns.called()
        claims = self._handing_out.claims_of(name, receipts)
        return await self._queues.consumers.nack(name, claims, error=error, delay_ms=delay_ms)

    async def release(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        self._queues.turns.called()
        return await self._queues.consumers.release(
            name, self._handing_out.claims_of(name, receipts)
        )

    async def extend(
        self, name: str, *receipts: str | ClaimedMessage, lease_ms: int | None = None
    ) -> list[int | None]:
        self._queues.turns.called()
        claims = self._handing_out.claims_of(name, receipts)
        return await self._queues.consumers.extend(name, claims, lease_ms=lease_ms)

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
        self._queues.turns.called()
        return await self._failures.finish(name, message_ids, all, filter, limit, again=True)

    async def purge_failed(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = MAX_FAILED_AT_ONCE,
    ) -> list[int]:
        self._queues.turns.called()
        return await self._failures.finish(name, message_ids, all, filter, limit, again=False)

    # --- in the background ------------------------------------------------------------------------

    @property
    def stores(self) -> OwnedStores:
        """For what maintains the stores, like the retention compactor."""
        return self.parts.stores

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
        await self._following.all_caught_up(self.parts.own_end)

    def figures(self) -> Iterator[Figure]:
        """How commits and requests to the store have fared, for the operator of this process."""
        yield from self.parts.figures()
        yield from self._background.figures()

    @property
    def troubles(self) -> list[str]:
        """What is wrong, for people, though all is served."""
        return self.parts.troubles

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
        await self.parts.close()

    def _step_down(self, error: FencedError) -> None:
        self.parts.step_down(error)
        if self.on_lost is not None:
            self.on_lost(error)
