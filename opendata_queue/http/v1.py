"""The native API: every operation of a system under ``/v1``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from starlette.routing import Route

from opendata_queue.http import wire
from opendata_queue.http.errors import ErrorBody
from opendata_queue.http.requests.decoding import BodyDecoder, MessagesDecoder
from opendata_queue.http.requests.exchange import (
    Answer,
    Broker,
    Endpoint,
    Inquiry,
    large_answer_with,
)
from opendata_queue.http.requests.operations import Handler, Operations
from opendata_queue.http.wire import (
    JSON,
    MSGPACK,
    OPERATIONS,
    WireOperation,
    json_schemas,
)

_PUBLISH: Final[MessagesDecoder[wire.Publish]] = MessagesDecoder(
    wire.Publish,
    wire.PublishOutline,
    wire.MessageToPublish,
    lambda outline: outline.messages,
    lambda outline, messages: outline.with_messages(messages),
)


def routes(broker: Broker) -> Iterator[Route]:
    operations = Operations(
        broker.system, broker.settings, broker.rates, broker.draining, broker.metrics.count
    )
    for operation in OPERATIONS.values():
        endpoint = Endpoint(
            broker,
            operation.path,
            _handler(operation, operations.handler(operation)),
            gives_payloads=operation.declared.gives_much,
        )
        yield Route(operation.path, endpoint, methods=["POST"])


def _handler(operation: WireOperation, handler: Handler) -> Callable[[Inquiry], Awaitable[Answer]]:
    decoder: BodyDecoder[Any] | MessagesDecoder[Any] = BodyDecoder(operation.request)
    if operation.request is wire.Publish:
        decoder = _PUBLISH

    async def handle(inquiry: Inquiry) -> Answer:
        inquiry.caller.check_action(operation.declared.action)
        is_msgpack = inquiry.is_msgpack
        if not is_msgpack:
            inquiry.check_json()
        asked = await decoder.decode(inquiry.body, is_msgpack=is_msgpack, share=inquiry.share)
        result = await handler(inquiry.caller, asked, inquiry.work)
        return large_answer_with(operation.answer_of(result), inquiry)

    return handle


# --- OpenAPI --------------------------------------------------------------------------------------


def schemas() -> dict[str, Any]:
    types = [kind for one in OPERATIONS.values() for kind in (one.request, one.response)]
    return json_schemas([*types, ErrorBody])


def paths() -> dict[str, Any]:
    return {one.path: {"post": _described(one)} for one in OPERATIONS.values()}


def _described(operation: WireOperation) -> dict[str, Any]:
    return {
        "operationId": operation.name,
        "tags": ["v1"],
        "summary": operation.declared.summary,
        "description": f"Takes the action `{operation.declared.action}`. Also in `{MSGPACK}`.",
        "requestBody": {"required": True, "content": {JSON: _ref(operation.request.__name__)}},
        "responses": {
            "200": {"description": "Done", "content": {JSON: _ref(operation.response.__name__)}},
            **refusals(400, 401, 403, 404, 408, 409, 413, 415, 429, 503),
        },
    }


def refusals(*statuses: int) -> dict[str, Any]:
    body = {JSON: _ref(ErrorBody.__name__)}
    return {str(one): {"description": "Refused", "content": body} for one in statuses}


def _ref(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}
