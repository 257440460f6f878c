"""One request, from its bytes to the bytes of its answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from opendata_queue.http.auth.browsers import PageCheck
from opendata_queue.http.auth.namespaces import Caller, unrestricted_caller
from opendata_queue.http.auth.tokens import Gate
from opendata_queue.http.errors import ErrorBody
from opendata_queue.http.refusals import Refusal, come_back, invalid, no_room_to_answer, refusal_of
from opendata_queue.http.requests.bad_requests import BadRequests
from opendata_queue.http.requests.connections import IS_GONE
from opendata_queue.http.requests.limits import Disconnected, RateLimits, read_body
from opendata_queue.http.requests.logs import ACCESS_LOGGER
from opendata_queue.http.requests.metrics import Metrics
from opendata_queue.http.requests.operations import ServedSystem, Work
from opendata_queue.http.requests.pieces import Pieces
from opendata_queue.http.requests.room import Room, Share
from opendata_queue.http.requests.trace import trace_of
from opendata_queue.http.settings import ServerSettings
from opendata_queue.http.wire import JSON, MSGPACK, to_json
from opendata_queue.model.allowance import Allowance
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import ClosedError, FencedError, OdqError, StoreUnavailableError

logger = logging.getLogger(__name__)
access_logger = logging.getLogger(ACCESS_LOGGER)

_CLIENT_GONE: Final = 499
_LOGGED_IDS: Final = 10
_RETRY_AFTER_MS: Final = 1_000
_MAX_QUERY_FIELDS: Final = 32
_COUNTED_ANSWER_BYTES: Final = 64 * 1024
_ONLY_ONCE: Final = (
    *(b"authorization", b"host", b"content-type", b"content-length", b"transfer-encoding"),
    *(b"origin", b"sec-fetch-site"),
)
"""Headers by which it is decided what a request may do, and where it ends."""


class Broker:
    """What all requests share."""

    def __init__(self, system: ServedSystem, settings: ServerSettings, clock: Clock) -> None:
        self.system = system
        self.settings = settings
        self.clock = clock
        self.bad_requests = BadRequests(clock)
        self.gate = Gate(settings, clock)
        self.pages = PageCheck(settings)
        self.rates = RateLimits(settings, clock)
        self.metrics = Metrics(settings.max_metric_queues, system.figures)
        self.draining = asyncio.Event()
        """Set when no new work is taken on any more."""
        self.failure: OdqError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        """Called when the system can't go on: another one took over, or the store failed."""
        self.unsent_bytes: Callable[[], int] = lambda: 0
        """How much of their answers clients have yet to read."""
        self.bodies = Room(settings.max_bodies_bytes)
        self.answers = Room(settings.max_unsent_bytes, lambda: self.unsent_bytes())

    def allowance(self) -> Allowance:
        """Room for one answer."""
        return Allowance(self.settings.max_answer_bytes, self.answers.take, self.answers.give)

    def drain(self) -> None:
        self.draining.set()

    def notice(self, error: OdqError) -> None:
        """An operation has failed: was that the end of the system?"""
        ended = isinstance(error, FencedError | ClosedError) or (
            isinstance(error, StoreUnavailableError) and error.in_doubt
        )
        if ended and self.failure is None and not self.draining.is_set():
            logger.error("the system has stopped: %s", error)
            self.failure = error
            self.on_failure()


@dataclass(frozen=True, kw_only=True, slots=True)
class Inquiry:
    """A request that was let in."""

    caller: Caller
    headers: dict[bytes, str]
    query: dict[str, str]
    body: bytes
    share: Share
    """Of the room for bodies."""
    work: Work

    @property
    def is_msgpack(self) -> bool:
        return _media_type(self.headers.get(b"content-type")) == MSGPACK

    def check_json(self) -> None:
        """Refuse other forms; a web page can send those to a broker without being asked."""
        given = _media_type(self.headers.get(b"content-type"))
        if given != JSON:
            raise invalid(f"Content-Type is {given or 'missing'}, not {JSON}", 415)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    body: bytes
    status: int = 200
    media_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Pieces | None = None
    """The body, if it is too large to be made at once."""


Handler = Callable[[Inquiry], Awaitable[Answer]]


class Endpoint:
    """An ASGI application that answers the requests of one route."""

    def __init__(
        self,
        broker: Broker,
        route: str,
        handler: Handler,
        *,
        while_draining: bool = False,
        open_to_all: bool = False,
        gives_payloads: bool = False,
    ) -> None:
        self._broker = broker
        self._gives_payloads = gives_payloads
        self._open_to_all = open_to_all
        self._route = route
        self._handler = handler
        self._while_draining = while_draining
        self._metrics = broker.metrics.route(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        work = Work(trace_of(headers), lambda: _disconnected(receive), self._broker.allowance())
        status = _CLIENT_GONE
        self._metrics.asked()
        try:
            answer = await self._answer(scope, receive, headers, work)
            status = answer.status
            if len(answer.body) > _COUNTED_ANSWER_BYTES:
                work.allowance.settle(len(answer.body))
            await _send(scope, send, answer)
        except Disconnected:
            status = _CLIENT_GONE
        finally:
            # The loop writes at the end of its turn; what is left then counts as not read yet.
            if work.allowance.taken_bytes > _COUNTED_ANSWER_BYTES:
                loop.call_soon(work.allowance.give_back)
            else:
                work.allowance.give_back()
            seconds = loop.time() - started
            self._metrics.answered(status, seconds)
            if self._broker.settings.access_log and self._is_logged(status, work):
                self._log(status, seconds, work)

    async def _answer(
        self, scope: Scope, receive: Receive, headers: dict[bytes, str], work: Work
    ) -> Answer:
        try:
            return await self._handle(scope, receive, headers, work)
        except Refusal as refusal:
            return _refused(refusal, headers)
        except OdqError as error:
            self._broker.notice(error)
            return _refused(refusal_of(error), headers)
        except (Disconnected, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("%s failed", self._route)
            body = ErrorBody(error="StoreUnavailableError", message="internal error", in_doubt=True)
            return _refused(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, body), headers)

    async def _handle(
        self, scope: Scope, receive: Receive, headers: dict[bytes, str], work: Work
    ) -> Answer:
        broker = self._broker
        if broker.draining.is_set() and not self._while_draining:
            refusal = come_back(503, "the broker is shutting down", _RETRY_AFTER_MS)
            refusal.headers["Connection"] = "close"
            raise refusal
        if len(headers) < len(scope["headers"]):
            check_repeated(scope["headers"])
        broker.pages.check(headers)
        caller = (
            unrestricted_caller()
            if self._open_to_all
            else broker.gate.caller(headers.get(b"authorization"))
        )
        work.has_token = broker.settings.uses_tokens and not self._open_to_all
        if self._gives_payloads and broker.answers.is_full:
            raise no_room_to_answer()
        share = Share(broker.bodies)
        try:
            announced = headers.get(b"content-length")
            inquiry = Inquiry(
                caller=caller,
                headers=headers,
                query=_query(scope["query_string"]),
                body=await read_body(receive, broker.settings, announced, share),
                share=share,
                work=work,
            )
            return await self._handler(inquiry)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"the request makes no sense: {error}") from error
        finally:
            share.give_back()

    def _is_logged(self, status: int, work: Work) -> bool:
        """All are, except some of the refused ones without a token, which any client can repeat."""
        refused = 400 <= status < 500 and status != _CLIENT_GONE
        return work.has_token or not refused or self._broker.bad_requests.admits_refused()

    def _log(self, status: int, seconds: float, work: Work) -> None:
        line = {
            "time_ms": self._broker.clock.now_ms(),
            "route": self._route,
            "status": status,
            "ms": round(seconds * 1000, 2),
            "messages": len(work.message_ids),
            "message_ids": [str(one) for one in work.message_ids[:_LOGGED_IDS]],
            **work.trace,
        }
        access_logger.info("%s", json.dumps(line))


def _query(query: bytes) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(
            query.decode("latin-1"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_QUERY_FIELDS,
        )
    except ValueError as error:
        raise invalid(f"the query makes no sense: {error}") from error
    if len(found := dict(pairs)) < len(pairs):
        raise invalid("a parameter of the query is given twice")
    return found


def _media_type(text: str | None) -> str:
    return "" if text is None else text.partition(";")[0].strip().lower()


def wants_msgpack(headers: dict[bytes, str]) -> bool:
    """In which form to answer: the one asked for, or else that of the request."""
    accepted = headers.get(b"accept", "*/*")
    if MSGPACK in accepted:
        return True
    if JSON in accepted:
        return False
    return _media_type(headers.get(b"content-type")) == MSGPACK


def check_repeated(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a request that says two things where one counts: others may go by the other one."""
    counts = Counter(name for name, _ in headers)
    for name in _ONLY_ONCE:
        if counts[name] > 1:
            raise invalid(f"the header {name.decode()} is given {counts[name]} times")


def large_answer_with(result: Any, inquiry: Inquiry) -> Answer:
    """An answer that is made in pieces if it is large."""
    if not inquiry.work.allowance.is_large:
        return answer_with(result, inquiry.headers)
    return in_pieces(result, as_msgpack=wants_msgpack(inquiry.headers))


def in_pieces(result: Any, *, as_msgpack: bool) -> Answer:
    pieces = Pieces(result, as_msgpack=as_msgpack)
    return Answer(body=b"", media_type=pieces.media_type, pieces=pieces)


def answer_with(result: Any, headers: dict[bytes, str]) -> Answer:
    if wants_msgpack(headers):
        return Answer(body=msgspec.msgpack.encode(result), media_type=MSGPACK)
    return Answer(body=to_json(result))


def _refused(refusal: Refusal, headers: dict[bytes, str]) -> Answer:
    answer = answer_with(refusal.body, headers)
    return Answer(
        body=answer.body,
        status=refusal.status,
        media_type=answer.media_type,
        headers=refusal.headers,
    )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(scope: Scope, send: Send, answer: Answer) -> None:
    headers = [(b"content-type", answer.media_type.encode())]
    pieces = answer.pieces
    if pieces is None:
        headers.append((b"content-length", str(len(answer.body)).encode()))
    elif scope["http_version"] == "1.0":  # which has no chunks
        headers.append((b"content-length", str(await pieces.count()).encode()))
    headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if pieces is not None:
        is_gone = scope.get(IS_GONE, lambda: False)
        for piece in pieces:
            # Returns when the client has read most of what it was sent before.
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
            if is_gone():
                raise Disconnected
    await send({"type": "http.response.body", "body": answer.body})
