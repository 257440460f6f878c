"""Connections: how long a client may take in each state, and how much is kept of what it sends.

| a connection that | is closed |
|---|---|
| has asked for nothing yet, or has begun a head | ``header_timeout_ms`` after it began |
| has a body under way | when the body is late (``limits.read_body``) |
| is being worked for | never by this |
| sends the rest of a body that was answered already | ``header_timeout_ms`` after the answer |
| has its answer, and asks for nothing | ``idle_timeout_ms`` after the answer |
| has yet to read an answer | ``write_timeout_ms`` after it last read something, and after four times as long for all of the answer |
| is being closed, and does not read | ``write_timeout_ms`` later, without waiting for it |

One sweep goes through all of them several times within the shortest of these times: a timer for each
state of each request would cost more than all else that is done here for a request.
"""  # noqa: E501

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, ClassVar, Final, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from opendata_queue.http.requests.bad_requests import BadRequests
from opendata_queue.http.settings import ServerSettings

IS_GONE: Final = "odq.is_gone"
"""In the scope of a request: a function that says whether its client has gone."""

MAX_HEAD_BYTES: Final = 32 * 1024
MAX_HEADERS: Final = 100
MAX_PIPELINED: Final = 16
"""Requests of a client that wait for the answers to those before them. What it sends beyond these
is not parsed before it is their turn, and no more is read from it until then."""

_FED_AT_ONCE_BYTES: Final = 512
"""Of what may hold many requests."""

_MAX_STRAY_BYTES: Final = 4 * 1024
"""Within a body, of what is none of it: sizes of chunks, and what is written behind them."""

_FREE_PIECES: Final = 4 * 1024
_MEAN_PIECE_BYTES: Final = 64
"""What a body has in each piece at least, on average, if it comes in more than the free ones: a
chunk costs as much work with one byte in it as with a thousand."""

_JUST_COME_SECONDS: Final = 1.0
_WHOLE_ANSWER_FACTOR: Final = 4
_SWEEPS_WITHIN_A_DEADLINE: Final = 4
_MAX_SWEEP_SECONDS: Final = 1.0


class _Reading(IntEnum):
    """Which part of a request is expected next."""

    NEXT = 0
    HEAD = 1
    BODY = 2


class _Refused(Exception):
    """What a client sends is not taken; the text says why."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class _Flow(FlowControl):
    """Reads nothing from a client while there are enough requests of it at hand."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class Connections:
    """All connections of one broker."""

    def __init__(self, settings: ServerSettings, bad_requests: BadRequests) -> None:
        self.header_seconds = settings.header_timeout_ms / 1000
        self.idle_seconds = settings.idle_timeout_ms / 1000
        self.write_seconds = settings.write_timeout_ms / 1000
        self.max_connections = settings.max_connections
        self.max_rest_bytes = settings.max_body_bytes
        self.bad_requests = bad_requests
        self.all: set[Connection] = set()
        self.silent: dict[Connection, None] = {}
        """All whose clients have not asked for anything yet, the oldest first."""
        self.idle: dict[Connection, None] = {}
        """All whose clients have their answers, and have not asked for more, the oldest first."""
        self.slow: set[Connection] = set()
        """All whose clients have yet to read much of an answer."""
        shortest = min(self.header_seconds, self.idle_seconds, self.write_seconds)
        self._sweep_seconds = min(_MAX_SWEEP_SECONDS, shortest / _SWEEPS_WITHIN_A_DEADLINE)
        self._swept_at = -math.inf

    def sweep_in_time(self, now: float) -> None:
        if now - self._swept_at >= self._sweep_seconds:
            self.sweep(now)

    def sweep(self, now: float) -> None:
        """Close all whose time is over, by the clock of the event loop."""
        self._swept_at = now
        for one in list(self.all):
            one.check(now)
        self.bad_requests.sweep()

    def make_room(self) -> bool:
        """Close a connection that has the least to lose; false if all are in use.

        Those that have not asked for anything for a while go first, then those that have been idle
        for longest. One that has just come is about to ask: it goes only if there is no other.
        """
        oldest = next(iter(self.silent), None)
        idlest = next(iter(self.idle), None)
        least = idlest if oldest is None or oldest.has_just_come else oldest
        least = least or oldest
        if least is None:
            return False
        least.give_way()
        return True

    def unsent_bytes(self) -> int:
        """How much clients have yet to read, but for what a system keeps for each anyway."""
        return sum(one.transport.get_write_buffer_size() for one in self.slow)


class Connection(HttpToolsProtocol):
    """One connection; see above for its deadlines."""

    kept: ClassVar[Connections]
    """All of them; set in a subclass for each broker."""

    _reading = _Reading.NEXT
    _until = math.inf
    """When the client must have sent what is expected of it."""
    _head_bytes = 0
    """Of headers that are whole."""
    _partial_bytes = 0
    """Of a head that comes in parts."""
    _has_body_bytes = False
    """Whether the data at hand has some of a body."""
    _stray_bytes = 0
    _rest_bytes = 0
    _pieces = 0
    """In which the body has come so far."""
    _body_bytes = 0
    _deaf = False
    """Whether nothing more is read: the client has gone over to another protocol."""
    _unsent_bytes = 0
    _unsent_at = 0.0
    _slow_since = 0.0
    _closing_since = 0.0
    _came_at = 0.0
    _worked_for: Any = None
    """The request that is being answered, or was last."""
    _unparsed = b""
    """What came behind as many requests as may wait."""
    _refusal: _Refused | None = None
    """What to say when those requests are answered that came before what is refused."""
    flow: _Flow

    # --- coming and going -------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport)
        kept = self.kept
        kept.all.add(self)
        self._came_at = self.loop.time()
        if len(kept.all) > kept.max_connections and not kept.make_room():
            transport.close()
            return
        self._until = self.loop.time() + kept.header_seconds
        kept.silent[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        kept = self.kept
        kept.all.discard(self)
        kept.slow.discard(self)
        self._ask_no_more()
        if self._worked_for is not None and not self._worked_for.response_complete:
            # The one that is worked for need not be the last one that was asked.
            self._worked_for.disconnected = True
            self._worked_for.message_event.set()
        self.pipeline.clear()
        if self.scope is not None:
            cast("dict[str, Any]", self.scope).pop(IS_GONE, None)  # else it would refer to itself
        super().connection_lost(exc)

    def is_gone(self) -> bool:
        """Whether the client of the request that is being answered has gone."""
        return bool(self._worked_for.disconnected)

    @property
    def has_just_come(self) -> bool:
        return self.loop.time() - self._came_at < _JUST_COME_SECONDS

    def give_way(self) -> None:
        """End for the sake of another one."""
        self._ask_no_more()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()
        self.kept.all.discard(self)

    def _ask_no_more(self) -> None:
        """It is not one of those any more that may ask for something."""
        self.kept.silent.pop(self, None)
        self.kept.idle.pop(self, None)

    # --- deadlines --------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End if time is over."""
        transport = self.transport
        if transport.is_closing():
            self._check_closing(now)
        elif unsent_bytes := transport.get_write_buffer_size():
            self._check_unsent(unsent_bytes, now)
        else:
            self._unsent_bytes = 0
            if now >= self._until and not self._is_busy:
                self._ask_no_more()
                transport.close()

    def _check_closing(self, now: float) -> None:
        if not self._closing_since:
            self._closing_since = now
        elif now - self._closing_since >= self.kept.write_seconds:
            self.transport.abort()

    def _check_unsent(self, unsent_bytes: int, now: float) -> None:
        if not 0 < self._unsent_bytes <= unsent_bytes:
            self._unsent_bytes, self._unsent_at = unsent_bytes, now  # it reads
        seconds = self.kept.write_seconds
        too_slow = self._slow_since and now - self._slow_since >= seconds * _WHOLE_ANSWER_FACTOR
        if too_slow or now - self._unsent_at >= seconds:
            self.kept.bad_requests.note("a client that does not read its answer is hung up on")
            self.transport.abort()  # to close it would wait for the client, and keep the answer

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._slow_since:
            self._slow_since = self._unsent_at = self.loop.time()
            self._unsent_bytes = self.transport.get_write_buffer_size()
        else:
            self._unsent_bytes = 0  # it has read something: its time begins with the next sweep
        self.kept.slow.add(self)

    def resume_writing(self) -> None:
        if self._worked_for is None or self._worked_for.response_complete:
            self._slow_since = 0.0  # and not before: an answer comes in pieces
        self.kept.slow.discard(self)
        super().resume_writing()

    # --- what a client sends ----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()

    def _parse(self) -> None:
        """Parse what has come, until as many requests wait as may."""
        data, self._unparsed = self._unparsed, b""
        free = MAX_PIPELINED - len(self.pipeline)
        # Each head ends with an empty line: with no more of them there are no more requests.
        if free > 0 and data.count(b"\n\r\n") < free:
            self._feed(data)
            return
        done = 0
        while done < len(data) and len(self.pipeline) < MAX_PIPELINED and not self._deaf:
            self._feed(data[done : done + _FED_AT_ONCE_BYTES])
            done += _FED_AT_ONCE_BYTES
        if done < len(data) and not self._deaf:
            self._unparsed = data[done:]
            self.flow.pause_reading()
            self.flow.is_full = True

    def _parse_more(self) -> None:
        """An answer was given: perhaps another request can be taken on."""
        if not self._unparsed or len(self.pipeline) >= MAX_PIPELINED:
            return
        self.flow.is_full = False
        self._parse()
        self.flow.resume_reading()

    def _feed(self, data: bytes) -> None:
        self._has_body_bytes = False
        before = self._reading
        try:
            self.parser.feed_data(data)
            # What came with another part as well is bounded by what one read brings.
            if self._reading and self._reading is before:
                self._count(len(data))
        except httptools.HttpParserUpgrade:
            # Answered as if nothing had been said of another protocol; then that is all.
            self._deaf = True
            self.cycle.keep_alive = False
        except (httptools.HttpParserError, _Refused) as error:
            reason = error.__context__ or error
            if not isinstance(reason, _Refused):
                # What the parser itself says has nothing of the request in it.
                why = f": {error}" if type(error) is httptools.HttpParserError else ""
                reason = _Refused(f"this is no HTTP/1.1{why}")
            self._refuse(reason)

    def _count(self, size: int) -> None:
        """Bound what is kept of a request that is not whole yet."""
        if self._reading is _Reading.HEAD:
            self._partial_bytes += size
            if self._partial_bytes > MAX_HEAD_BYTES:
                raise _Refused("the head is too long")
            return
        self._stray_bytes = 0 if self._has_body_bytes else self._stray_bytes + size
        if self._stray_bytes > _MAX_STRAY_BYTES:
            raise _Refused("a chunk has no end, or a trailer has none")
        if self.cycle.response_complete:
            self._rest_bytes += size
            if self._rest_bytes > self.kept.max_rest_bytes:
                raise _Refused("a body goes on and on that was answered already")

    def _refuse(self, refused: _Refused) -> None:
        """Say why, after the answers to all that came before; and close."""
        self.kept.bad_requests.note(f"bad request: {refused}")
        self._ask_no_more()
        self._deaf = True
        cycle = self.cycle
        if self._reading is _Reading.BODY:
            if cycle.response_started:
                self.transport.close()  # a second answer would be taken for another's
                return
            # No handler may have it, or wait for the rest of it.
            cycle.disconnected = True
            cycle.message_event.set()
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
            else:
                self._say(refused)
                return
        if self._is_busy:
            self._refusal = refused
        else:
            self._say(refused)

    @property
    def _is_busy(self) -> bool:
        """Whether a request is being answered, or waits."""
        worked_for = self._worked_for
        return worked_for is not None and not worked_for.response_complete

    def _say(self, refused: _Refused) -> None:
        text = f"Bad request: {refused}.".encode()
        self.transport.write(
            b"%bcontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (STATUS_LINE[refused.status], len(text), text)
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = _Reading.HEAD
        self._head_bytes = self._partial_bytes = self._stray_bytes = self._rest_bytes = 0
        self._pieces = self._body_bytes = 0
        if self.cycle is not None:
            self._until = self.loop.time() + self.kept.header_seconds

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > MAX_HEAD_BYTES:
            raise _Refused("the head is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is _Reading.BODY:
            # It would be taken for a header of the request, after all headers were checked.
            raise _Refused("trailers are not taken")
        self._head_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            raise _Refused("the head is too long")
        name = name.lower()
        if name == b"transfer-encoding":
            self._check_coding(value)
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def _check_coding(self, value: bytes) -> None:
        """Refuse what would be taken for a body as it is, or by others for another length."""
        if value.strip().lower() != b"chunked":
            raise _Refused("no transfer coding is taken but chunked", 501)
        if any(name == b"transfer-encoding" for name, _ in self.headers):
            raise _Refused("the header transfer-encoding is given twice")

    def _check_length(self) -> None:
        names = [name for name, _ in self.headers]
        if b"transfer-encoding" not in names:
            return
        if b"content-length" in names:
            raise _Refused("a body has a content-length or a transfer-encoding, and not both")
        if self.parser.get_http_version() != "1.1":
            raise _Refused("chunks are for HTTP/1.1")

    def on_headers_complete(self) -> None:
        self._check_length()
        self._until = math.inf
        self._ask_no_more()
        super().on_headers_complete()
        cast("dict[str, Any]", self.scope)[IS_GONE] = self.is_gone
        self._reading = _Reading.BODY

    def on_body(self, body: bytes) -> None:
        self._has_body_bytes = True
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > _FREE_PIECES and self._body_bytes < self._pieces * _MEAN_PIECE_BYTES:
            raise _Refused("a body in so many small pieces is not taken")
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading = _Reading.NEXT
        if self.cycle.response_complete:
            self._await_request()

    # --- answers ----------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._worked_for = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if not self.flow.write_paused:
            self._slow_since = 0.0
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            self._parse_more()
        elif self._refusal is not None:
            self._say(self._refusal)
        elif self._reading is _Reading.NEXT:
            self._await_request()
        else:
            if self._reading is _Reading.BODY:
                self.cycle.body.clear()
                self._until = self.loop.time() + self.kept.header_seconds
            self.kept.idle[self] = None

    def _await_request(self) -> None:
        self._until = self.loop.time() + self.kept.idle_seconds
        self.kept.idle.pop(self, None)  # the oldest come first
        self.kept.idle[self] = None
