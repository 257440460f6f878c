"""What broker and client say to each other: ``POST /v1/<operation>``, in msgpack or JSON.

A request holds the arguments of the method of ``AsyncSystem`` that it calls, under their own names
(the queue's is ``queue``). In JSON, which JavaScript reads too, message ids are decimal strings,
payloads are base64 and headers are an object; in msgpack ids are numbers, payloads are binary and
headers in answers are pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from odq_encodings import MAX_HEADERS
from opendata_queue.errors import (
    ClosedError,
    CorruptStoreError,
    FencedError,
    FormatVersionError,
    InvalidInputError,
    MessageExpiredError,
    OdqError,
    OtherRoleError,
    QueueExistsError,
    QueueNotFoundError,
    ShardFullError,
    StoreAccessError,
    StoreUnavailableError,
    TimedOutError,
    WrongContextError,
)
from opendata_queue.filters import FilterError
from opendata_queue.interface import (
    FailedMessage,
    MessageHistory,
    QueueInfo,
    QueuePage,
    QueueStats,
)
from opendata_queue.messages import ClaimedMessage, NewMessage, PeekedMessage, StoredMessage

T = TypeVar("T")

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

_U63: Final = (1 << 63) - 1
_IDS_IN_JSON: Final = frozenset({"message_id", "message_ids"})

Id: TypeAlias = Annotated[int, Meta(ge=0, le=_U63)] | Annotated[str, Meta(pattern="^[0-9]{1,19}$")]
"""A message id as requests give it: a number, or the decimal string that JSON answers have."""


MAX_BATCH: Final = 10_000
"""Messages, ids or receipts in one request; a longer list is refused before it is decoded."""

_MAX_OPTIONS: Final = 100

Many: TypeAlias = Annotated[list[T], Meta(max_length=MAX_BATCH)]


class Request(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an operation is asked. A name that is not known is a slip, and refused."""


# --- publishing and reading -----------------------------------------------------------------------


class MessageToPublish(Request):
    """See ``NewMessage``."""

    payload: bytes | None = None
    payload_uri: str | None = None
    headers: Annotated[dict[str, str], Meta(max_length=MAX_HEADERS)] = {}
    delay_ms: int | None = None
    visible_at_ms: int | None = None
    created_at_ms: int | None = None
    retention_seconds: int = 0
    idempotency_key: str | None = None

    @classmethod
    def of(cls, message: NewMessage, key: str | None = None) -> MessageToPublish:
        return cls(
            payload=message.payload,
            payload_uri=message.payload_uri,
            headers=message.headers,  # type: ignore[arg-type]  # a Mapping, encoded as it is
            delay_ms=message.delay_ms,
            visible_at_ms=message.visible_at_ms,
            created_at_ms=message.created_at_ms,
            retention_seconds=message.retention_seconds,
            idempotency_key=message.idempotency_key or key,
        )

    def as_new(self) -> NewMessage:
        return NewMessage(
            self.payload,
            payload_uri=self.payload_uri,
            headers=self.headers,
            delay_ms=self.delay_ms,
            visible_at_ms=self.visible_at_ms,
            created_at_ms=self.created_at_ms,
            retention_seconds=self.retention_seconds,
            idempotency_key=self.idempotency_key,
        )


class Publish(Request):
    messages: Many[MessageToPublish]
    key: str | None = None
    """Of the request: sent again with it, nothing is published a second time. Only for messages
    without idempotency keys of their own."""
    retried: bool = False
    """Whether the same was sent before and got no answer. One of several processes that publish
    does it only if it was the one that was asked then."""


class PublishOutline(Request):
    """The same with messages that are yet to be decoded."""

    messages: Many[Raw]
    key: str | None = None
    retried: bool = False

    def with_messages(self, messages: list[MessageToPublish]) -> Publish:
        return Publish(messages=messages, key=self.key, retried=self.retried)


class Read(Request):
    message_ids: Many[Id]


class MessageIds(Struct):
    message_ids: list[int]


class StoredMessages(Struct):
    messages: list[StoredMessage | None]


# --- queues ---------------------------------------------------------------------------------------


class Nothing(Request):
    """No arguments, or no answer but that it is done."""


class Queue(Request):
    queue: str


class CreateQueue(Queue):
    filter: str = ""
    options: Annotated[dict[str, int | float | bool], Meta(max_length=_MAX_OPTIONS)] = {}
    start: Literal["now", "beginning"] | int = "now"


class UpdateQueue(Queue):
    filter: str | None = None
    options: Annotated[dict[str, int | float | bool], Meta(max_length=_MAX_OPTIONS)] = {}


class QueueNames(Struct):
    queues: list[str]


class Count(Struct):
    count: int


# --- looking into queues --------------------------------------------------------------------------


class Peek(Queue):
    count: int = 1


class PeekedMessages(Struct):
    messages: list[PeekedMessage]


class Browse(Queue):
    state: Literal["available", "delayed", "in_flight", "done", "failed"]
    after: str | None = None
    limit: int = 100


class History(Request):
    message_id: Id


class FoundHistory(Struct):
    history: MessageHistory | None


# --- consuming ------------------------------------------------------------------------------------


class Claim(Queue):
    count: int = 1
    consumer: str | None = None
    lease_ms: int | None = None
    wait_ms: int = 0


class ClaimedMessages(Struct):
    messages: list[ClaimedMessage]


class Ack(Queue):
    receipts: Many[str]
    retried: bool = False
    """Whether this may have been done already: then a message that was acked with its receipt is
    ``ok`` again, and not ``lease_lost``."""


class Nack(Queue):
    receipts: Many[str]
    error: str = ""
    delay_ms: int | None = None


class Release(Queue):
    receipts: Many[str]


class Extend(Queue):
    receipts: Many[str]
    lease_ms: int | None = None


class Outcomes(Struct):
    outcomes: list[Literal["ok", "lease_lost"]]


class Deadlines(Struct):
    lease_deadlines_ms: list[int | None]


# --- failed messages ------------------------------------------------------------------------------


class ListFailed(Queue):
    filter: str | None = None
    after_id: (
        Annotated[int, Meta(ge=-1, le=_U63)] | Annotated[str, Meta(pattern="^(-1|[0-9]{1,19})$")]
    ) = -1
    limit: int = 100


class FailedMessages(Struct, omit_defaults=True):
    messages: list[FailedMessage]
    more: bool = False
    """Whether there are more within ``limit`` that an answer had no place for: they are behind the
    last one of these (``after_id``)."""


class ChooseFailed(Queue):
    message_ids: Many[Id] = []
    all: bool = False
    filter: str | None = None
    limit: int = 10_000


# --- the operations -------------------------------------------------------------------------------

Action = Literal["publish", "consume", "admin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One method of the interface, as it goes over the wire."""

    name: str
    request: type[Any]
    response: type[Any]
    action: Action
    summary: str
    repeatable: bool = True
    """Whether doing it twice does no harm, so that a client that heard nothing may try again."""

    @property
    def path(self) -> str:
        return f"/v1/{self.name}"


_OPERATIONS: Final = (
    Operation(
        name="publish",
        request=Publish,
        response=MessageIds,
        action="publish",
        summary="Publish messages, all of them or none",
        repeatable=False,
    ),
    Operation(
        name="read",
        request=Read,
        response=StoredMessages,
        action="consume",
        summary="Messages by their ids",
    ),
    Operation(
        name="create_queue",
        request=CreateQueue,
        response=QueueInfo,
        action="admin",
        summary="Make a queue of the messages that satisfy a filter",
    ),
    Operation(
        name="update_queue",
        request=UpdateQueue,
        response=QueueInfo,
        action="admin",
        summary="Change a queue's filter or options",
    ),
    Operation(
        name="purge_queue",
        request=Queue,
        response=Count,
        action="admin",
        summary="Drop the messages that wait",
        repeatable=False,
    ),
    Operation(
        name="delete_queue",
        request=Queue,
        response=Nothing,
        action="admin",
        summary="Delete a queue and all that it holds",
    ),
    Operation(
        name="get_queue",
        request=Queue,
        response=QueueInfo,
        action="consume",
        summary="What a queue was told",
    ),
    Operation(
        name="list_queues",
        request=Nothing,
        response=QueueNames,
        action="consume",
        summary="The names of all queues",
    ),
    Operation(
        name="stats",
        request=Queue,
        response=QueueStats,
        action="consume",
        summary="How many messages of a queue are where",
    ),
    Operation(
        name="peek",
        request=Peek,
        response=PeekedMessages,
        action="consume",
        summary="The next messages, without claiming them",
    ),
    Operation(
        name="browse",
        request=Browse,
        response=QueuePage,
        action="consume",
        summary="The messages of a queue that are in one state, by pages",
    ),
    Operation(
        name="history",
        request=History,
        response=FoundHistory,
        action="consume",
        summary="Where a message is in every queue",
    ),
    Operation(
        name="claim",
        request=Claim,
        response=ClaimedMessages,
        action="consume",
        summary="Take messages under a lease, and wait for some",
        repeatable=False,
    ),
    Operation(
        name="ack",
        request=Ack,
        response=Outcomes,
        action="consume",
        summary="Finish messages",
    ),
    Operation(
        name="nack",
        request=Nack,
        response=Outcomes,
        action="consume",
        summary="Report failure: the messages come back, or fail",
    ),
    Operation(
        name="release",
        request=Release,
        response=Outcomes,
        action="consume",
        summary="Give messages back, uncounted",
    ),
    Operation(
        name="extend",
        request=Extend,
        response=Deadlines,
        action="consume",
        summary="Hold messages for longer",
    ),
    Operation(
        name="failed",
        request=ListFailed,
        response=FailedMessages,
        action="consume",
        summary="Messages that were given up",
    ),
    Operation(
        name="replay",
        request=ChooseFailed,
        response=MessageIds,
        action="admin",
        summary="Make failed messages available again",
        repeatable=False,
    ),
    Operation(
        name="purge_failed",
        request=ChooseFailed,
        response=MessageIds,
        action="admin",
        summary="Forget failed messages",
        repeatable=False,
    ),
)
OPERATIONS: Final[Mapping[str, Operation]] = {one.name: one for one in _OPERATIONS}


# --- errors ---------------------------------------------------------------------------------------


MAX_ERROR_CHARS: Final = 4_000
"""Of the text of an error in an answer."""


class ErrorBody(Struct, kw_only=True, omit_defaults=True):
    """What went wrong: ``error`` is the name of the class that the client raises."""

    error: str
    message: str
    in_doubt: bool = False
    """Whether something was under way that may or may not have happened."""
    refused: bool = False
    """Whether nothing was tried at all, so that anything may be sent again later."""
    retry_after_ms: int | None = None
    reason: str | None = None
    line: int | None = None
    column: int | None = None
    address: str | None = None
    """Where to ask instead."""

    def __post_init__(self) -> None:
        if len(self.message) > MAX_ERROR_CHARS:  # much of what was sent may be repeated in it
            self.message = f"{self.message[:MAX_ERROR_CHARS]}…"


_ERRORS: Final[Mapping[str, type[OdqError]]] = {
    kind.__name__: kind
    for kind in (
        ClosedError,
        CorruptStoreError,
        FencedError,
        FormatVersionError,
        InvalidInputError,
        MessageExpiredError,
        QueueExistsError,
        QueueNotFoundError,
        ShardFullError,
        StoreAccessError,
        TimedOutError,
        WrongContextError,
    )
}


def body_of(error: OdqError) -> ErrorBody:
    """What to tell a client of an error."""
    body = ErrorBody(error=type(error).__name__, message=str(error))
    if isinstance(error, StoreUnavailableError):
        body.in_doubt = error.in_doubt
    if isinstance(error, OtherRoleError):
        body.address = error.address
    if isinstance(error, FilterError):
        body.reason, body.line, body.column = error.reason, error.line, error.column
    return body


def error_of(body: ErrorBody) -> OdqError:
    """The error that the broker has met, to be raised here."""
    if body.error == FilterError.__name__:
        return _filter_error(body)
    if body.error == OtherRoleError.__name__:
        return OtherRoleError(body.message, address=body.address)
    if body.error in _ERRORS:
        return _ERRORS[body.error](body.message)
    return StoreUnavailableError(body.message, in_doubt=body.in_doubt)


def _filter_error(body: ErrorBody) -> FilterError:
    """As it was made; the text that its message points into is not here to make it again."""
    error = FilterError(body.reason or body.message)
    error.args = (body.message,)
    error.line, error.column = body.line or 1, body.column or 1
    return error


# --- the two forms --------------------------------------------------------------------------------


def to_json(answer: object) -> bytes:
    """JSON that loses no digits in any reader."""
    return msgspec.json.encode(_readable(msgspec.to_builtins(answer)))


def _readable(value: Any, name: str = "") -> Any:
    if name in _IDS_IN_JSON:
        return [str(one) for one in value] if isinstance(value, list | tuple) else str(value)
    if name == "headers":
        return dict(value)
    if isinstance(value, dict):
        return {key: _readable(one, key) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(one) for one in value]
    return value


def json_schemas(types: Sequence[Any]) -> dict[str, Any]:
    """The JSON schemas of requests and answers, by their names, as ``to_json`` writes them."""
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    requests = {one.__name__ for one in types if issubclass(one, Request)}
    for name, schema in schemas.items():
        if name not in requests:
            _tell_as_json(schema)
    return schemas


def _tell_as_json(schema: dict[str, Any]) -> None:
    text = {"type": "string", "pattern": "^[0-9]{1,19}$"}
    for name, about in schema.get("properties", {}).items():
        if name == "message_id":
            schema["properties"][name] = text
        elif name == "message_ids":
            about["items"] = text
        elif name == "headers":
            schema["properties"][name] = {
                "type": "object",
                "additionalProperties": {"type": "string"},
            }


def id_of(given: int | str) -> int:
    """The number that an id in a request is."""
    number = int(given)
    if number > _U63:
        raise InvalidInputError(f"message_id is {given}, not within 0 to {_U63}")
    return number
