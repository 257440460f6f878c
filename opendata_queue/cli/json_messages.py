"""Messages as JSON: what ``consume`` prints and ``publish`` takes is the same."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final

from opendata_queue.cli.common import as_json_value
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.messages import NewMessage, StoredMessage
from opendata_queue.model.safe_text import json_text

_NUMBERS: Final = ("delay_ms", "visible_at_ms", "created_at_ms", "retention_seconds")
_TEXTS: Final = ("payload", "payload_base64", "payload_uri", "idempotency_key")
_KNOWN: Final = frozenset((*_NUMBERS, *_TEXTS, "headers"))
# What only a claimed message has: publishing it again gives it new ones.
_PASSED_OVER: Final = frozenset(
    {
        "message_id",
        "received_at_ms",
        "queue",
        "priority",
        "attempts",
        "lease_deadline_ms",
        "receipt",
    }
)


def message_as_json(message: StoredMessage) -> dict[str, Any]:
    """A message with its payload as text, where it is text, and else in base64."""
    shown: dict[str, Any] = as_json_value(message)
    payload = message.payload
    del shown["payload"]
    shown.pop("receipt", None)  # of no use: the command that prints it settles it
    if payload is None:
        return shown
    del shown["payload_uri"]
    try:
        shown["payload"] = payload.decode()
    except UnicodeDecodeError:
        shown["payload_base64"] = base64.b64encode(payload).decode()
    return shown


def json_line(value: object) -> bytes:
    return json_text(value).encode() + b"\n"


def message_of_line(line: bytes, defaults: NewMessage) -> NewMessage:
    """The message that a line of JSON describes; what it does not say is as in ``defaults``."""
    try:
        fields = json.loads(line)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"is no UTF-8: {error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"is no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise InvalidInputError("is no message: it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise InvalidInputError(f'is {_kind(fields)}, not an object like {{"payload": "hi"}}')
    _check(fields)
    return NewMessage(
        _payload(fields),
        payload_uri=fields.get("payload_uri"),
        headers={**defaults.headers, **fields.get("headers", {})},
        delay_ms=_given(fields, "delay_ms", _unless(fields, "visible_at_ms", defaults.delay_ms)),
        visible_at_ms=fields.get("visible_at_ms"),
        created_at_ms=fields.get("created_at_ms"),
        retention_seconds=_given(fields, "retention_seconds", defaults.retention_seconds),
        idempotency_key=fields.get("idempotency_key"),
    )


def _check(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _PASSED_OVER:
            continue
        if name not in _KNOWN:
            raise InvalidInputError(
                f"{name!r} is no property of a message; there are {', '.join(sorted(_KNOWN))}"
            )
        if value is None and name != "headers":
            continue
        if name in _NUMBERS and (not isinstance(value, int) or isinstance(value, bool)):
            raise InvalidInputError(f"{name} is {_kind(value)}, not a whole number")
        if name in _TEXTS and not isinstance(value, str):
            raise InvalidInputError(f"{name} is {_kind(value)}, not text")
    _check_headers(fields.get("headers", {}))


def _check_headers(headers: object) -> None:
    if not isinstance(headers, dict):
        raise InvalidInputError(f"headers are {_kind(headers)}, not an object")
    for name, value in headers.items():
        if not isinstance(value, str):
            raise InvalidInputError(f"header {name!r} is {_kind(value)}, not text")


def _payload(fields: Mapping[str, Any]) -> bytes | None:
    text, encoded, uri = (fields.get(name) for name in ("payload", "payload_base64", "payload_uri"))
    if sum(one is not None for one in (text, encoded, uri)) != 1:
        raise InvalidInputError("needs one of payload, payload_base64 and payload_uri")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidInputError(f"payload_base64 is no base64: {error}") from None
    if text is None:
        return None
    try:
        return bytes(text.encode())
    except UnicodeEncodeError:
        raise InvalidInputError("payload has half of a surrogate pair, which is no text") from None


def _given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else value


def _unless(fields: Mapping[str, Any], name: str, default: int | None) -> int | None:
    return default if fields.get(name) is None else None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {str: "text", int: "a number", float: "a number", list: "an array", dict: "an object"}
    return kinds[type(value)]
