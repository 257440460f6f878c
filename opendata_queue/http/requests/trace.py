"""W3C trace context: what a publish comes with is handed to the consumer of the message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from opendata_queue.model.allowance import headers_bytes
from opendata_queue.model.messages import MAX_HEADERS_BYTES

_PARENT: Final = "traceparent"
_STATE: Final = "tracestate"
# Two digits of version, the trace, the parent, flags; a later version may add to it.
_FORM: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_LONGEST_STATE: Final = 512
_MOST_HEADERS: Final = 255
_MOST_CHARACTERS: Final = MAX_HEADERS_BYTES // 4 - 2 * _LONGEST_STATE
"""Of headers that surely have room for a trace, however long their characters are in UTF-8."""

Trace = dict[str, str]


def trace_of(headers: Mapping[bytes, str]) -> Trace:
    """The trace that a request belongs to, as headers; empty if it has none that makes sense."""
    parent = headers.get(b"traceparent")
    if parent is None or _FORM.fullmatch(parent) is None or len(parent) > _LONGEST_STATE:
        return {}
    state = headers.get(b"tracestate")
    if not state or len(state) > _LONGEST_STATE:
        return {_PARENT: parent}
    return {_PARENT: parent, _STATE: state}


def with_trace(headers: Mapping[str, str], trace: Trace) -> Mapping[str, str]:
    """A message's headers and its trace, unless it has one of its own, or no room for it."""
    if not trace or _PARENT in headers or len(headers) + len(trace) > _MOST_HEADERS:
        return headers
    if headers_bytes(headers.items()) > _MOST_CHARACTERS:
        return headers
    return {**headers, **trace}
