"""What a new message must be like to be stored: checked by every writer before it gets an id."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Final

from odq_encodings import EncodingError, UriPayload
from opendata_queue.log.cache import CheckedMessage
from opendata_queue.log.idempotency import REQUEST_MARK, Scoped, record_key
from opendata_queue.log.payloads import is_user_uri
from opendata_queue.log.rows import MAX_TIME_MS
from opendata_queue.model.checks import check_integer
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.messages import MAX_HEADERS_BYTES, NewMessage

NAMESPACE_HEADER: Final = "namespace"
MAX_IDEMPOTENCY_KEY_BYTES: Final = 512
MAX_PAYLOAD_BYTES: Final = 512 * 1024 * 1024
MAX_RETENTION_SECONDS: Final = (1 << 32) - 1

_LENGTH_BYTES: Final = 2
"""In front of each key and each value of an encoded header."""
_HEADER_FIELD: Final = re.compile(r"headers\[(\d+)\]\.(key|value)")


def check_message(message: NewMessage, inline_bytes: int) -> CheckedMessage:
    """Encode what can be encoded without an id; refuse what can't be stored."""
    if message.__class__ is not NewMessage and not isinstance(message, NewMessage):
        raise InvalidInputError(f"is {type(message).__name__}, not a NewMessage")
    headers = message.headers
    if headers.__class__ is not dict and not isinstance(headers, Mapping):
        raise InvalidInputError(f"headers are {type(headers).__name__}, not a mapping")
    uri_value = None
    if message.payload_uri is not None:
        uri_value = _uri_value(message)
    elif message.payload.__class__ is not bytes or len(message.payload) > MAX_PAYLOAD_BYTES:
        _check_payload(message.payload)
    try:
        checked = CheckedMessage(message, inline_bytes)
    except EncodingError as error:
        raise _bad_header(headers, error) from error
    if len(checked.encoded_headers) > MAX_HEADERS_BYTES:
        _check_size(checked)
    checked.uri_value = uri_value
    delay_ms, visible_at_ms = message.delay_ms, message.visible_at_ms
    if delay_ms is not None:
        if visible_at_ms is not None:
            raise InvalidInputError("delay_ms and visible_at_ms exclude each other")
        check_integer("delay_ms", delay_ms, 0, MAX_TIME_MS // 2)
    elif visible_at_ms is not None:
        check_integer("visible_at_ms", visible_at_ms, -MAX_TIME_MS, MAX_TIME_MS)
    if message.created_at_ms is not None:
        check_integer("created_at_ms", message.created_at_ms, -MAX_TIME_MS, MAX_TIME_MS)
    retention = message.retention_seconds
    if retention.__class__ is not int or retention:
        check_integer("retention_seconds", retention, 0, MAX_RETENTION_SECONDS)
    if message.idempotency_key is not None:
        checked.key = scoped_key(message, message.idempotency_key)
    return checked


def _bad_header(headers: Mapping[str, str], error: EncodingError) -> InvalidInputError:
    """Name a header as its producer knows it, not as the field of a record."""
    field = _HEADER_FIELD.fullmatch(error.field or "")
    if field is None:
        return InvalidInputError(f"headers: {error.reason}")
    place, part = field.groups()
    key = reprlib.repr(list(headers)[int(place)])
    name = f"the name of header {key}" if part == "key" else f"the value of header {key}"
    return InvalidInputError(f"{name}: {error.reason}")


def _check_size(checked: CheckedMessage) -> None:
    size_bytes = len(checked.encoded_headers) - 2 * _LENGTH_BYTES * len(checked.headers)
    if size_bytes > MAX_HEADERS_BYTES:
        raise InvalidInputError(
            f"headers have {size_bytes} bytes in all, over the limit of {MAX_HEADERS_BYTES}; "
            "put large data into the payload"
        )


def _check_payload(payload: bytes | None) -> None:
    if not isinstance(payload, bytes):
        kind = type(payload).__name__
        raise InvalidInputError(f"payload is {kind}, not bytes, and there is no payload_uri")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidInputError(
            f"payload has {len(payload)} bytes, over the limit of {MAX_PAYLOAD_BYTES}; "
            "store it yourself and publish its payload_uri"
        )


def _uri_value(message: NewMessage) -> bytes:
    assert message.payload_uri is not None
    if message.payload is not None:
        raise InvalidInputError("payload and payload_uri exclude each other")
    value = UriPayload(uri=message.payload_uri).encode()
    if not is_user_uri(message.payload_uri):
        raise InvalidInputError(f"payload_uri {message.payload_uri!r} has no scheme, like s3://…")
    return value


def request_key(messages: Sequence[NewMessage], key: str) -> Scoped:
    """The key of a publish of many, which is only repeated by one of as many messages.

    Its record has the first id alone: a caller with more messages under the same key, or with an
    equal key for one of them alone, would get ids that are not its own.
    """
    namespace, given = scoped_key(messages[0], key)
    return namespace, f"{REQUEST_MARK}{given}/{len(messages)}"


def scoped_key(message: NewMessage, key: str) -> Scoped:
    scoped = message.headers.get(NAMESPACE_HEADER, ""), key
    record_key(scoped)  # refuses what has no UTF-8
    size = len(key.encode())
    if not 0 < size <= MAX_IDEMPOTENCY_KEY_BYTES:
        raise InvalidInputError(
            f"idempotency_key has {size} bytes, not 1 to {MAX_IDEMPOTENCY_KEY_BYTES}"
        )
    if key.startswith(REQUEST_MARK):
        raise InvalidInputError(f"idempotency_key {key!r} begins with U+0000, which is reserved")
    return scoped
