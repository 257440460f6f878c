"""What each request under ``/v1`` does, within what its caller may."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Final

from opendata_queue.http import wire
from opendata_queue.http.auth.namespaces import Caller, namespace_of
from opendata_queue.http.refusals import come_back, invalid, no_room_to_answer
from opendata_queue.http.requests.limits import Disconnected, RateLimits
from opendata_queue.http.requests.trace import Trace, with_trace
from opendata_queue.http.settings import ServerSettings
from opendata_queue.log.checks import NAMESPACE_HEADER
from opendata_queue.model.allowance import COUNTED_BYTES, MESSAGE_BYTES, Allowance, headers_bytes
from opendata_queue.model.messages import (
    ClaimedMessage,
    NewMessage,
    PeekedMessage,
    StoredMessage,
)
from opendata_queue.model.options import QueueOptions
from opendata_queue.model.values import (
    BrowsedState,
    FoundEntry,
    FoundPage,
    MessageHistory,
    Outcome,
    QueueEntry,
    QueueInfo,
)
from opendata_queue.queues.browse import MAX_HISTORY_QUEUES
from opendata_queue.queues.store import MAX_AT_ONCE, MAX_CONSUMER_BYTES, MAX_ERROR_BYTES
from opendata_queue.systems.engine import Engine
from opendata_queue.systems.finding import PAGE_BYTES
from opendata_queue.systems.ingest import Ingest

_ASK_ANOTHER_MS: Final = 100
_RECEIPT_HEAD: Final = struct.Struct(">QH")
_ENTRY_BYTES: Final = 25


ServedSystem = Engine | Ingest
Handler = Callable[[Caller, Any, "Work"], Awaitable[Any]]
"""Does what a request asks for, and gives the result of the operation."""


class Work:
    """One request under way: what its handler needs in addition to its arguments."""

    __slots__ = ("allowance", "disconnected", "has_token", "message_ids", "trace")

    def __init__(
        self,
        trace: Trace,
        disconnected: Callable[[], Awaitable[None]],
        allowance: Allowance,
    ) -> None:
        self.trace = trace
        self.allowance = allowance
        """Room for its answer."""
        self.disconnected = disconnected
        """Returns when the client has gone."""
        self.message_ids: list[int] = []
        """For the log."""
        self.has_token = False
        """Whether its caller has shown one that is good."""


class Operations:
    """The operations of a system: those that are more than a call have a method of their name."""

    def __init__(
        self,
        system: ServedSystem,
        settings: ServerSettings,
        rates: RateLimits,
        draining: asyncio.Event,
        count: Callable[[str, int], None],
    ) -> None:
        self._system = system
        self._settings = settings
        self._rates = rates
        self._draining = draining
        self._count = count

    def handler(self, operation: wire.WireOperation) -> Handler:
        """What does an operation, within what its caller may."""
        own: Handler | None = getattr(self, operation.name, None)
        if own is not None:
            return own
        if not operation.declared.is_of_a_queue:
            # What a caller may see of the whole root is different each time.
            raise NotImplementedError(f"{operation.name} needs a handler of its own")
        return partial(self._call, operation)

    async def _call(
        self, operation: wire.WireOperation, caller: Caller, asked: wire.Queue, work: Work
    ) -> Any:
        arguments = operation.arguments_of(asked)
        for given in arguments.values():
            if isinstance(given, list):
                self._check_batch(given)
        await self._enter(caller, asked.queue)
        if not operation.declared.gives_much:
            return await operation.declared.call(self._system, arguments)
        # A page of one state: as much as it can be, until it is known how much it is.
        limit = min(max(arguments["limit"], 0), MAX_AT_ONCE)
        found_bytes = PAGE_BYTES if operation.response is FoundPage else 0
        _take(work, _most_bytes(arguments["state"], limit) + found_bytes)
        page = await operation.declared.call(self._system, arguments)
        work.allowance.give_back()
        _take(work, sum(map(_entry_bytes, page.entries)))
        return page

    # --- publishing and reading -------------------------------------------------------------------

    async def publish(self, caller: Caller, asked: wire.Publish, work: Work) -> list[int]:
        self._check_batch(asked.messages)
        messages = [one.as_new() for one in asked.messages]
        for message in messages:
            message.headers = with_trace(message.headers, work.trace)
            caller.stamp(message)
        costs = Counter(one.headers.get(NAMESPACE_HEADER, "") for one in messages)
        for namespace, cost in costs.items():
            self._rates.take(namespace, cost)
        if asked.retried:
            await self._check_published_here(messages, asked.key)
        if asked.key is None:
            work.message_ids = await self._system.publish_many(messages)
        else:
            work.message_ids = await self._system.publish_once(messages, asked.key)
        self._count("published", len(messages))
        return work.message_ids

    async def _check_published_here(self, messages: list[NewMessage], key: str | None) -> None:
        """Refuse a repetition that another process may have done already (RFC 0008)."""
        if isinstance(self._system, Ingest) and not await self._system.knows(messages, key):
            raise come_back(
                503,
                "another process that publishes may have stored these messages, and only that one "
                "knows",
                _ASK_ANOTHER_MS,
            )

    async def read(self, caller: Caller, asked: Any, work: Work) -> list[StoredMessage | None]:
        self._check_batch(asked.message_ids)
        self._charge(caller)
        ids = [*map(wire.id_of, asked.message_ids)]
        once = [*dict.fromkeys(ids)]
        found = await self._system.read_within(once, work.allowance)
        by_id = dict(zip(once, found, strict=False))
        # An id that is asked for twice is read once, and takes its place in the answer twice.
        fits = len(found) == len(once) and (
            len(once) == len(ids)
            or work.allowance.take(_repeated_bytes(ids, by_id), messages=len(ids) - len(once))
        )
        if not fits:
            if work.allowance.no_room:
                raise no_room_to_answer()
            raise invalid(
                f"these messages have over {self._settings.max_answer_bytes:,} bytes: ask for fewer"
            )
        return [
            one if one is not None and caller.may_see(one.headers) else None
            for one in map(by_id.__getitem__, ids)
        ]

    # --- queues -----------------------------------------------------------------------------------

    async def create_queue(self, caller: Caller, asked: wire.CreateQueue, work: Work) -> QueueInfo:
        self._enter_new(caller, asked.queue)
        info = await self._system.create_queue(
            asked.queue,
            filter=caller.confined(asked.queue, asked.filter),
            options=QueueOptions().with_changes(asked.options),
            start=asked.start,
        )
        return _shown(caller, info)

    async def update_queue(self, caller: Caller, asked: wire.UpdateQueue, work: Work) -> QueueInfo:
        info = await self._enter(caller, asked.queue)
        filter = None if asked.filter is None else caller.confined(asked.queue, asked.filter)
        info.options.with_changes(asked.options)  # what is no option would be taken for an argument
        info = await self._system.update_queue(asked.queue, filter=filter, **asked.options)
        return _shown(caller, info)

    async def delete_queue(self, caller: Caller, asked: wire.Queue, work: Work) -> None:
        self._enter_new(caller, asked.queue)
        await self._system.delete_queue(asked.queue)

    async def get_queue(self, caller: Caller, asked: wire.Queue, work: Work) -> QueueInfo:
        return _shown(caller, await self._enter(caller, asked.queue))

    async def list_queues(
        self, caller: Caller, asked: wire.ListQueues, work: Work
    ) -> wire.QueueNames:
        self._charge(caller)
        limit = asked.limit or wire.MAX_BATCH
        names: list[str] = []
        # Of other namespaces nothing is read: there may be many queues in them.
        for prefix in _prefixes(caller, asked.prefix):
            left = limit + 1 - len(names)
            names += await self._system.list_queues(prefix=prefix, after=asked.after, limit=left)
            if len(names) > limit:
                break
        more = len(names) > limit
        if more and asked.limit is None:
            # Some of them would be taken for all.
            raise invalid(f"there are over {limit:,} queues: ask for pages, with limit and after")
        names = names[:limit]
        _take(work, sum(map(len, names)) + _ENTRY_BYTES * len(names))
        return wire.QueueNames(queues=names, more=more)

    # --- reading queues ---------------------------------------------------------------------------

    async def peek(self, caller: Caller, asked: Any, work: Work) -> list[PeekedMessage]:
        await self._enter(caller, asked.queue)
        messages = await self._engine.peek(asked.queue, asked.count, within=work.allowance)
        if not messages and work.allowance.no_room:
            raise no_room_to_answer()
        return messages

    async def history(self, caller: Caller, asked: Any, work: Work) -> MessageHistory | None:
        self._charge(caller)
        _take(work, _most_bytes("failed", MAX_HISTORY_QUEUES))
        found = await self._system.history(wire.id_of(asked.message_id))
        work.allowance.give_back()
        if found is None or not caller.may_see(found.headers):
            return None
        entries = tuple(one for one in found.entries if caller.may_use(one.queue))
        if not caller.everywhere:
            # Who has claimed it is noted for all queues together: show who has it in these.
            consumers = {one.consumer for one in entries}
            found = replace(found, consumers=tuple(c for c in found.consumers if c in consumers))
        _take(work, headers_bytes(found.headers) + sum(map(_entry_bytes, entries)))
        return replace(found, entries=entries)

    # --- consuming --------------------------------------------------------------------------------

    async def claim(self, caller: Caller, asked: wire.Claim, work: Work) -> list[ClaimedMessage]:
        await self._enter(caller, asked.queue)
        # Mostly there is something, and nothing has to be watched meanwhile.
        claimed = await self._claim(asked, min(asked.wait_ms, 0), work)
        if not claimed and asked.wait_ms > 0 and not work.allowance.no_room:
            wait_ms = min(asked.wait_ms, self._settings.max_wait_ms)
            claimed = await self._claim_waiting(asked, wait_ms, work)
        if not claimed and work.allowance.no_room:
            raise no_room_to_answer()
        work.message_ids = [one.message_id for one in claimed]
        self._count("claimed", len(claimed))
        return claimed

    async def _claim(self, asked: wire.Claim, wait_ms: int, work: Work) -> list[ClaimedMessage]:
        return await self._engine.claim(
            asked.queue,
            asked.count,
            consumer=asked.consumer,
            lease_ms=asked.lease_ms,
            wait_ms=wait_ms,
            within=work.allowance,
        )

    async def _claim_waiting(
        self, asked: wire.Claim, wait_ms: int, work: Work
    ) -> list[ClaimedMessage]:
        """Wait for messages, unless the client goes away or the broker shuts down."""
        claiming = asyncio.ensure_future(self._claim(asked, wait_ms, work))
        gone = asyncio.ensure_future(work.disconnected())
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait([claiming, gone, draining], return_when=asyncio.FIRST_COMPLETED)
            if not claiming.done():
                # It gives back what it has taken.
                claiming.cancel()
                await asyncio.wait([claiming])
            claimed = [] if claiming.cancelled() else claiming.result()
            if gone.done():
                await self._system.release(asked.queue, *claimed)
                raise Disconnected
            return claimed
        finally:
            for task in (claiming, gone, draining):
                task.cancel()

    async def ack(self, caller: Caller, asked: wire.Ack, work: Work) -> list[Outcome]:
        await self._enter_with(caller, asked.queue, asked.receipts)
        outcomes = await self._system.ack(asked.queue, *asked.receipts)
        self._count("acked", outcomes.count("ok"))
        if asked.retried:
            outcomes = [
                await self._acked_before(asked.queue, receipt) if outcome != "ok" else outcome
                for receipt, outcome in zip(asked.receipts, outcomes, strict=True)
            ]
        return outcomes

    async def _acked_before(self, queue: str, receipt: str) -> Outcome:
        """Whether the lost receipt of a repeated ack is the one that finished its message."""
        message_id, attempts = _RECEIPT_HEAD.unpack_from(bytes.fromhex(receipt))
        found = await self._system.history(message_id)
        for entry in () if found is None else found.entries:
            if (entry.queue, entry.state, entry.attempts) == (queue, "done", attempts):
                return "ok"
        return "lease_lost"

    async def nack(self, caller: Caller, asked: Any, work: Work) -> list[Outcome]:
        await self._enter_with(caller, asked.queue, asked.receipts)
        outcomes = await self._system.nack(
            asked.queue, *asked.receipts, error=asked.error, delay_ms=asked.delay_ms
        )
        self._count("nacked", outcomes.count("ok"))
        return outcomes

    # --- failed messages --------------------------------------------------------------------------

    async def failed(
        self, caller: Caller, asked: wire.ListFailed, work: Work
    ) -> wire.FailedMessages:
        await self._enter(caller, asked.queue)
        messages = await self._engine.failed(
            asked.queue,
            filter=asked.filter,
            after_id=int(asked.after_id),
            limit=asked.limit,
            within=work.allowance,
        )
        if not messages and work.allowance.no_room:
            raise no_room_to_answer()
        return wire.FailedMessages(messages=messages, more=bool(work.allowance.left))

    @property
    def _engine(self) -> Engine:
        """The system, where it serves queues; otherwise what is asked for was refused before."""
        assert isinstance(self._system, Engine)
        return self._system

    # --- may they? --------------------------------------------------------------------------------

    def _charge(self, caller: Caller) -> None:
        """Charge a request that names no queue to the namespaces that the caller may read.

        A caller who may read all of them is charged where queues without a namespace are.
        """
        for namespace in sorted(caller.namespaces or [""]):
            self._rates.take(namespace)

    def _enter_new(self, caller: Caller, queue: str) -> None:
        """Check that a caller may use a queue of this name, whether or not it is there."""
        caller.check_queue(queue)
        self._rates.take(namespace_of(queue) or "")

    async def _enter(self, caller: Caller, queue: str) -> QueueInfo:
        """Check that a caller may use a queue, which must be there."""
        self._enter_new(caller, queue)
        info = await self._system.get_queue(queue)
        caller.check_confined(queue, info.filter)
        return info

    async def _enter_with(self, caller: Caller, queue: str, receipts: list[str]) -> None:
        self._check_batch(receipts)
        await self._enter(caller, queue)

    def _check_batch(self, given: Collection[Any]) -> None:
        if len(given) > self._settings.max_batch:
            raise invalid(
                f"{len(given)} in one request are over the limit of {self._settings.max_batch}"
            )


def _prefixes(caller: Caller, prefix: str) -> list[str]:
    """How the names begin, among those with a prefix, that a caller may see; in their order."""
    if caller.namespaces is None:
        return [prefix]
    # What has a "/" in it is no namespace; so none of these is the beginning of another one.
    own = sorted(f"{one}/" for one in caller.namespaces if "/" not in one)
    return [
        max(one, prefix, key=len) for one in own if one.startswith(prefix) or prefix.startswith(one)
    ]


def _take(work: Work, size_bytes: int) -> None:
    """Take room for an answer that has a bound of its own, before it is made."""
    if not work.allowance.reserve(size_bytes):
        raise no_room_to_answer()


def _repeated_bytes(ids: list[int], by_id: dict[int, StoredMessage | None]) -> int:
    """The size of all messages but the first one of each id."""
    size_bytes = 0
    for message_id, count in Counter(ids).items():
        message = by_id[message_id]
        if message is not None and count > 1:
            once_bytes = len(message.payload or message.payload_uri or b"") + COUNTED_BYTES
            size_bytes += (count - 1) * (once_bytes + headers_bytes(message.headers))
    return size_bytes


def _most_bytes(state: BrowsedState, entries: int) -> int:
    """What entries of a state can have: a consumer where they were claimed, an error in the end."""
    texts_bytes = {"in_flight": MAX_CONSUMER_BYTES, "failed": MAX_CONSUMER_BYTES + MAX_ERROR_BYTES}
    return entries * (MESSAGE_BYTES + texts_bytes.get(state, 0))


def _entry_bytes(entry: QueueEntry) -> int:
    headers = entry.headers if isinstance(entry, FoundEntry) else ()
    texts = len(entry.consumer or "") + len(entry.error or "")
    return MESSAGE_BYTES + texts + headers_bytes(headers)


def _shown(caller: Caller, info: QueueInfo) -> QueueInfo:
    return replace(info, filter=caller.shown(info.name, info.filter))
