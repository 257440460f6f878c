"""The MQueue API: ``/enqueue``, ``/dequeue``, ``/ack`` and ``/nack``, in JSON with numeric ids.

A namespace and a topic are the queue ``namespace/topic``, made on first use, of the messages whose
headers ``namespace`` and ``topic`` say so. Messages are acked by their id alone: that is taken to
mean the latest claim of it, if that was made here by the same subject (the ``sub`` of the token).
Ids can be guessed, so an id alone never finishes what another subject, or a client of ``/v1``, has
claimed. If ``/dequeue`` is asked for ``receipts``, each message comes with one: it stands for
exactly that claim, and any caller who may consume from the queue can send it.

A process that only publishes can make no queues. The process that serves them makes the queue of a
topic when it is first asked for, from the beginning of the logs of such processes: so nothing is
missed that was enqueued before. Its own log is left out: there ``/enqueue`` makes the queue first.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from starlette.routing import Route

from opendata_queue.filters import (
    MAX_PRIORITY,
    PRIORITY_HEADER,
    And,
    Comparison,
    Filter,
    Header,
    Operator,
    Rule,
    Text,
)
from opendata_queue.http.auth.namespaces import Caller
from opendata_queue.http.errors import ErrorBody
from opendata_queue.http.refusals import Refusal, invalid, no_room_to_answer
from opendata_queue.http.requests.decoding import MessagesDecoder
from opendata_queue.http.requests.exchange import Answer, Broker, Endpoint, Inquiry, in_pieces
from opendata_queue.http.requests.trace import with_trace
from opendata_queue.http.v1 import refusals
from opendata_queue.http.wire import JSON, Many
from opendata_queue.log.checks import NAMESPACE_HEADER
from opendata_queue.model.errors import QueueExistsError, QueueNotFoundError
from opendata_queue.model.ids import MAX_MESSAGE_ID
from opendata_queue.model.messages import NewMessage
from opendata_queue.model.options import check_name
from opendata_queue.queues.receipts import QueueReceipts, Receipts
from opendata_queue.queues.state import Claim
from opendata_queue.root.roles import Role
from opendata_queue.systems.engine import Engine
from opendata_queue.systems.ingest import Ingest

TOPIC_HEADER: Final = "topic"

_RECEIPTS_KEPT: Final = 100_000
_MAX_LIMIT: Final = 1_000
_CONSUMER: Final = "mqueue"
_LONGEST_SUBJECT: Final = 100
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WHOLE_NUMBER: Final = re.compile(r"[0-9]{1,6}")

MessageId = Annotated[int, Meta(ge=0, le=MAX_MESSAGE_ID)]


class Item(Struct, kw_only=True):
    namespace: str
    topic: str
    payload: bytes
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] | None = None
    deliver_after: Annotated[datetime, Meta(tz=True)] | None = None
    idempotency_key: str | None = None


class LeasedItem(Struct, kw_only=True, omit_defaults=True):
    id: int
    payload: bytes | None
    lease_expires_at: str
    receipt: str | None = None
    """If it was asked for."""


class Acknowledge(Struct, kw_only=True):
    id: MessageId
    namespace: str
    topic: str
    receipt: str | None = None


class NegativeAcknowledge(Struct, kw_only=True):
    id: MessageId
    namespace: str
    topic: str
    error: str = ""
    receipt: str | None = None


class TopicQueues:
    """The queues of namespaces and topics, and who holds which of their messages."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._system = broker.system
        self._receipts: OrderedDict[tuple[str, int, str], str] = OrderedDict()
        """By queue, message and consumer."""

    async def enqueue(self, inquiry: Inquiry) -> Answer:
        inquiry.caller.check_action("publish")
        inquiry.check_json()
        items = await _ITEMS.decode(inquiry.body, is_msgpack=False, share=inquiry.share)
        if len(items) > self._broker.settings.max_batch:
            raise invalid(f"{len(items)} items are over {self._broker.settings.max_batch}")
        messages = [_message(item, inquiry) for item in items]
        for message in messages:
            inquiry.caller.stamp(message)
        for namespace, cost in Counter(item.namespace for item in items).items():
            self._broker.rates.take(namespace, cost)
        for namespace, topic in {(item.namespace, item.topic): None for item in items}:
            if isinstance(self._system, Ingest):
                _checked_queue(inquiry.caller, namespace, topic)
            else:
                await self._ensure(inquiry.caller, namespace, topic)
        ids = await self._system.publish_many(messages)
        inquiry.work.message_ids = ids
        self._broker.metrics.count("published", len(ids))
        return _json(ids)

    async def dequeue(self, inquiry: Inquiry) -> Answer:
        inquiry.caller.check_action("consume")
        namespace, topic = _required(inquiry, "namespace"), _required(inquiry, "topic")
        limit = _limit(inquiry.query.get("limit", "10"))
        with_receipts = inquiry.query.get("receipts", "false") == "true"
        queue = self._enter(inquiry.caller, namespace, topic)
        await self._ensure(inquiry.caller, namespace, topic)
        await self._check_confined(inquiry.caller, queue)
        consumer = _consumer(inquiry.caller)
        assert isinstance(self._system, Engine)  # another system could not make the queue
        claimed = await self._system.claim(
            queue, limit, consumer=consumer, within=inquiry.work.allowance
        )
        if not claimed and inquiry.work.allowance.no_room:
            raise no_room_to_answer()
        for message in claimed:
            self._remember((queue, message.message_id, consumer), message.receipt)
        inquiry.work.message_ids = [one.message_id for one in claimed]
        self._broker.metrics.count("claimed", len(claimed))
        leased = [
            LeasedItem(
                id=one.message_id,
                payload=one.payload,
                lease_expires_at=_timestamp(one.lease_deadline_ms),
                receipt=one.receipt if with_receipts else None,
            )
            for one in claimed
        ]
        if inquiry.work.allowance.is_large:
            return in_pieces(leased, as_msgpack=False)
        return _json(leased)

    async def ack(self, inquiry: Inquiry) -> Answer:
        inquiry.caller.check_action("consume")
        inquiry.check_json()
        asked = _ACK.decode(inquiry.body)
        queue = self._enter(inquiry.caller, asked.namespace, asked.topic)
        await self._check_confined(inquiry.caller, queue)
        claim = (queue, asked.id, _consumer(inquiry.caller))
        receipt = await self._receipt(claim, asked.receipt)
        (outcome,) = await self._system.ack(queue, receipt)
        return self._settled(claim, outcome, "acked")

    async def nack(self, inquiry: Inquiry) -> Answer:
        inquiry.caller.check_action("consume")
        inquiry.check_json()
        asked = _NACK.decode(inquiry.body)
        queue = self._enter(inquiry.caller, asked.namespace, asked.topic)
        await self._check_confined(inquiry.caller, queue)
        claim = (queue, asked.id, _consumer(inquiry.caller))
        receipt = await self._receipt(claim, asked.receipt)
        (outcome,) = await self._system.nack(queue, receipt, error=asked.error)
        return self._settled(claim, outcome, "nacked")

    def _settled(self, claim: tuple[str, int, str], outcome: str, event: str) -> Answer:
        self._receipts.pop(claim, None)
        if outcome != "ok":
            queue, message_id, _ = claim
            raise _conflict(f"message {message_id} of {queue} is not leased any more")
        self._broker.metrics.count(event, 1)
        return _json({})

    # --- queues -----------------------------------------------------------------------------------

    def _enter(self, caller: Caller, namespace: str, topic: str) -> str:
        """The name of a queue that a caller may use, within the rate."""
        queue = _checked_queue(caller, namespace, topic)
        self._broker.rates.take(namespace)
        return queue

    async def _check_confined(self, caller: Caller, queue: str) -> None:
        caller.check_confined(queue, (await self._system.get_queue(queue)).filter)

    async def _ensure(self, caller: Caller, namespace: str, topic: str) -> None:
        """Make the queue of a namespace and topic if it is not there."""
        queue = _checked_queue(caller, namespace, topic)
        try:
            await self._system.get_queue(queue)
        except QueueNotFoundError:
            await self._make(caller, queue, namespace, topic)

    async def _make(self, caller: Caller, queue: str, namespace: str, topic: str) -> None:
        assert isinstance(self._system, Engine)
        # Without tokens a client can invent namespaces: then the queues of all of them count.
        count = self._system.count_queues(namespace if caller.confines else None)
        if count >= self._broker.settings.max_topic_queues:
            raise _conflict(f"there are too many queues to make {queue}")
        filter = Filter((Rule(And((_is(NAMESPACE_HEADER, namespace), _is(TOPIC_HEADER, topic)))),))
        try:
            if self._broker.settings.role is Role.QUEUES:
                await self._system.create_queue(queue, filter=filter.text, start="beginning")
            else:
                await self._system.create_queue_after_others(queue, filter=filter.text)
        except QueueExistsError:  # another request was first
            await self._system.get_queue(queue)

    # --- receipts ---------------------------------------------------------------------------------

    def _remember(self, claim: tuple[str, int, str], receipt: str) -> None:
        self._receipts[claim] = receipt
        self._receipts.move_to_end(claim)
        if len(self._receipts) > _RECEIPTS_KEPT:
            self._receipts.popitem(last=False)

    async def _receipt(self, claim: tuple[str, int, str], given: str | None) -> str:
        """What to show for a message that was handed out, by this broker or the one before it."""
        if given is not None:
            (shown,) = (await self._signer(claim[0])).read([given])
            if shown.message_id != claim[1]:
                raise invalid(f"the receipt is not that of message {claim[1]}")
            return given
        receipt = self._receipts.get(claim)
        return receipt if receipt is not None else await self._find_receipt(*claim)

    async def _signer(self, queue: str) -> QueueReceipts:
        created_at_ms = (await self._system.get_queue(queue)).created_at_ms
        return Receipts(self._system.descriptor.secret_bytes).of(queue.encode(), created_at_ms)

    async def _find_receipt(self, queue: str, message_id: int, consumer: str) -> str:
        found = await self._system.history(message_id)
        entries = () if found is None else found.entries
        entry = next((one for one in entries if one.queue == queue), None)
        if entry is None:
            body = ErrorBody(
                error="InvalidInputError", message=f"there is no message {message_id} in {queue}"
            )
            raise Refusal(404, body)
        if entry.state != "in_flight":
            raise _conflict(f"message {message_id} of {queue} is {entry.state}, and not leased")
        if entry.consumer != consumer:
            raise _conflict(
                f"message {message_id} of {queue} was leased by another consumer: send its receipt"
            )
        assert entry.attempts is not None
        assert entry.claimed_at_ms is not None
        claim = Claim(message_id, entry.attempts, entry.claimed_at_ms)
        return (await self._signer(queue)).make(claim)


_ITEMS: Final[MessagesDecoder[list[Item]]] = MessagesDecoder(
    Many[Item], Many[msgspec.Raw], Item, lambda outline: outline, lambda _, items: items
)
_ACK: Final = msgspec.json.Decoder(Acknowledge)
_NACK: Final = msgspec.json.Decoder(NegativeAcknowledge)


def _consumer(caller: Caller) -> str:
    """Who claims, and may ack by an id alone: the same subject, through any broker."""
    subject = caller.subject
    if len(subject) > _LONGEST_SUBJECT:
        subject = sha256(subject.encode(errors="replace")).hexdigest()
    return f"{_CONSUMER}:{subject}" if subject else _CONSUMER


def _checked_queue(caller: Caller, namespace: str, topic: str) -> str:
    """The name of the queue of a namespace and topic, if the caller may use it."""
    if "/" in namespace:
        raise invalid(f"namespace {namespace!r} has a '/'")
    queue = f"{namespace}/{topic}"
    caller.check_queue(queue)
    check_name(queue)
    return queue


def _is(header: str, value: str) -> Comparison:
    return Comparison(Header(header), Operator.EQUAL, Text(value))


def _message(item: Item, inquiry: Inquiry) -> NewMessage:
    headers = {NAMESPACE_HEADER: item.namespace, TOPIC_HEADER: item.topic}
    if item.priority is not None:
        headers[PRIORITY_HEADER] = str(item.priority)
    return NewMessage(
        item.payload,
        headers=with_trace(headers, inquiry.work.trace),
        visible_at_ms=None if item.deliver_after is None else _milliseconds(item.deliver_after),
        idempotency_key=item.idempotency_key,
    )


def _milliseconds(moment: datetime) -> int:
    # Not by astimezone: in the first and in the last year that leaves what a datetime can say.
    offset = moment.utcoffset() or timedelta()
    since = (moment.replace(tzinfo=UTC) - _EPOCH - offset) // timedelta(milliseconds=1)
    return max(0, since)


def _timestamp(time_ms: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _required(inquiry: Inquiry, name: str) -> str:
    value = inquiry.query.get(name)
    if not value:
        raise invalid(f"the query parameter {name!r} is missing")
    return value


def _limit(text: str) -> int:
    if not _WHOLE_NUMBER.fullmatch(text) or not 1 <= int(text) <= _MAX_LIMIT:
        raise invalid(f"limit is {text!r}, not within 1 to {_MAX_LIMIT}")
    return int(text)


def _conflict(message: str) -> Refusal:
    return Refusal(409, ErrorBody(error="InvalidInputError", message=message))


def _json(value: Any) -> Answer:
    return Answer(body=msgspec.json.encode(value))


def routes(broker: Broker) -> Iterator[Route]:
    queues = TopicQueues(broker)
    for path, method, handler in (
        ("/enqueue", "POST", queues.enqueue),
        ("/dequeue", "GET", queues.dequeue),
        ("/ack", "POST", queues.ack),
        ("/nack", "POST", queues.nack),
    ):
        endpoint = Endpoint(broker, path, handler, gives_payloads=path == "/dequeue")
        route = Route(path, endpoint, methods=[method])
        route.methods = {method}  # and not HEAD, which must not claim anything
        yield route


# --- OpenAPI --------------------------------------------------------------------------------------


def schemas() -> dict[str, Any]:
    kinds = [Item, LeasedItem, Acknowledge, NegativeAcknowledge]
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return found


def paths() -> dict[str, Any]:
    parameters = [
        {"name": "namespace", "in": "query", "required": True, "schema": {"type": "string"}},
        {"name": "topic", "in": "query", "required": True, "schema": {"type": "string"}},
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT, "default": 10},
        },
        {"name": "receipts", "in": "query", "schema": {"type": "boolean", "default": False}},
    ]
    return {
        "/enqueue": {
            "post": _described("enqueue", _array(_ref(Item)), _array({"type": "integer"}))
        },
        "/dequeue": {
            "get": {
                **_described("dequeue", None, _array(_ref(LeasedItem))),
                "parameters": parameters,
            }
        },
        "/ack": {"post": _described("ack_by_id", _ref(Acknowledge), {"type": "object"})},
        "/nack": {"post": _described("nack_by_id", _ref(NegativeAcknowledge), {"type": "object"})},
    }


def _described(name: str, request: Any, response: Any) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": name,
        "tags": ["MQueue"],
        "responses": {
            "200": {"description": "Done", "content": {JSON: {"schema": response}}},
            **refusals(400, 401, 403, 404, 408, 409, 413, 415, 429, 503),
        },
    }
    if request is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": request}}}
    return described


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
