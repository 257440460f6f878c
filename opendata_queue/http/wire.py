"""What broker and client say to each other: ``POST /v1/<operation>``, in msgpack or JSON.

A request holds the arguments of the method of ``AsyncSystem`` that it calls, under their own names
(the queue's is ``queue``). In JSON, which JavaScript reads too, message ids are decimal strings,
payloads are base64 and headers are an object; in msgpack ids are numbers, payloads are binary and
headers in answers are pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from odq_encodings import MAX_HEADERS
from opendata_queue.api.operation import Operation
from opendata_queue.api.system import OPERATIONS as _DECLARED
from opendata_queue.model.errors import (
    InvalidInputError,
)
from opendata_queue.model.messages import ClaimedMessage, NewMessage, StoredMessage, receipts_of
from opendata_queue.model.values import (
    FailedMessage,
    MessageHistory,
)

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
    """The arguments of an operation. A name that is not known is a mistake, and refused."""


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


class MessageIds(Struct):
    message_ids: list[int]


class StoredMessages(Struct):
    messages: list[StoredMessage | None]


# --- queues ---------------------------------------------------------------------------------------


class Nothing(Request):
    """No arguments, or no answer but that it is done."""


class Queue(Request):
    queue: str


class ListQueues(Request):
    prefix: str = ""
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_BATCH)] | None = None
    """Without it all names are given, and if there are more than 10,000, none."""


class CreateQueue(Queue):
    filter: str = ""
    options: Annotated[dict[str, int | float | bool], Meta(max_length=_MAX_OPTIONS)] = {}
    start: Literal["now", "beginning"] | int = "now"


class UpdateQueue(Queue):
    filter: str | None = None
    options: Annotated[dict[str, int | float | bool], Meta(max_length=_MAX_OPTIONS)] = {}


class QueueNames(Struct, omit_defaults=True):
    queues: list[str]
    more: bool = False
    """Whether there are more behind the last one of these (``after``)."""


# --- reading queues -------------------------------------------------------------------------------


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

# Those that say more than the arguments and the result of a method, or are known by other names.
# All others come from the declarations.
_REQUESTS: Final[Mapping[str, type[Request]]] = {
    "publish": Publish,
    "list_queues": ListQueues,
    "create_queue": CreateQueue,
    "update_queue": UpdateQueue,
    "claim": Claim,
    "ack": Ack,
    "failed": ListFailed,
    "replay": ChooseFailed,
    "purge_failed": ChooseFailed,
}
_ANSWERS: Final[Mapping[str, type[Struct]]] = {
    "publish": MessageIds,
    "read": StoredMessages,
    "list_queues": QueueNames,
    "history": FoundHistory,
    "claim": ClaimedMessages,
    "extend": Deadlines,
    "failed": FailedMessages,
    "replay": MessageIds,
    "purge_failed": MessageIds,
}
_TYPES_OF_ARGUMENTS: Final[Mapping[str, Any]] = {
    "message_id": Id,
    "message_ids": Many[Id],
    "receipts": Many[str],
}
"""How arguments are sent whose types are others in a call, by their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireOperation:
    """An operation as it goes over the wire."""

    name: str
    path: str
    declared: Operation
    request: type[Request]
    response: type[Any]
    answer_of: Callable[[Any], Any]
    """Makes the answer that holds a result."""
    result_of: Callable[[Any], Any]
    """Gets it back."""

    def request_of(self, arguments: Mapping[str, Any]) -> Request:
        """What to send for a call."""
        return self.request(**{_field(name): _sent(name, arguments[name]) for name in arguments})

    def arguments_of(self, asked: Request) -> dict[str, Any]:
        """The arguments of the call that a request is for."""
        return {
            one.name: _taken(one.name, getattr(asked, _field(one.name)))
            for one in self.declared.parameters
        }


def _on_the_wire(operation: Operation) -> WireOperation:
    response = _response(operation)
    answer_of: Callable[[Any], Any] = _as_it_is
    result_of: Callable[[Any], Any] = _as_it_is
    if operation.answer is not None:  # by what makes and reads structures, without a call of ours
        answer_of, result_of = response, attrgetter(operation.answer)
    elif response is Nothing:
        answer_of, result_of = _nothing, _no_result
    return WireOperation(
        name=operation.name,
        path=f"/v1/{operation.name}",
        declared=operation,
        request=_request(operation),
        response=response,
        answer_of=answer_of,
        result_of=result_of,
    )


def _as_it_is(answer: Any) -> Any:
    return answer


def _nothing(result: Any) -> Nothing:
    return Nothing()


def _no_result(answer: Nothing) -> None:
    return None


def _field(parameter: str) -> str:
    return "queue" if parameter == "name" else parameter


def _sent(name: str, value: Any) -> Any:
    if name == "receipts":
        return receipts_of(value)
    return list(value) if name == "message_ids" else value


def _taken(name: str, value: Any) -> Any:
    if name == "message_id":
        return id_of(value)
    return [*map(id_of, value)] if name == "message_ids" else value


def _request(operation: Operation) -> type[Request]:
    """A structure with the arguments of an operation."""
    if operation.name in _REQUESTS:
        return _REQUESTS[operation.name]
    types = operation.types()
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for one in operation.parameters:
        kind = _TYPES_OF_ARGUMENTS.get(one.name, types[one.name])
        if one.name != "name":
            fields.append(
                (one.name, kind) if one.default is one.empty else (one.name, kind, one.default)
            )
    base = Queue if operation.is_of_a_queue else Request
    if not fields:
        return base if operation.is_of_a_queue else Nothing
    made = msgspec.defstruct(
        _title(operation.name), fields, bases=(base,), module=__name__, kw_only=True
    )
    return cast(type[Request], made)


def _response(operation: Operation) -> type[Any]:
    """A structure with the result of an operation, or its type if that is one already."""
    if operation.name in _ANSWERS:
        return _ANSWERS[operation.name]
    result = operation.types()["return"]
    if result is type(None):
        return Nothing
    if operation.answer is None:
        return cast(type[Any], result)
    return _structure(_title_of_answer(result, operation.answer), operation.answer, result)


@cache
def _structure(title: str, field: str, kind: Any) -> type[Any]:
    return msgspec.defstruct(title, [(field, kind)], module=__name__)


def _title_of_answer(result: Any, field: str) -> str:
    """Of a list of records the name of these, of anything else that of its field."""
    records = [one for one in get_args(result) if isinstance(one, type) and is_dataclass(one)]
    return f"{records[0].__name__}s" if records else _title(field)


def _title(name: str) -> str:
    return name.title().replace("_", "")


OPERATIONS: Final[Mapping[str, WireOperation]] = {
    name: _on_the_wire(one) for name, one in _DECLARED.items()
}


# --- the two forms --------------------------------------------------------------------------------


def to_json(answer: object, name: str = "") -> bytes:
    """JSON that loses no digits in any reader; ``name`` is that of the field it is for."""
    return msgspec.json.encode(_readable(msgspec.to_builtins(answer), name))


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
            _describe_as_json(schema)
    return schemas


def _describe_as_json(schema: dict[str, Any]) -> None:
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
