"""A system behind a broker: the same interface, over HTTP.

What is repeated after trouble, and what is not:

- Nothing was tried (no connection, or the broker said so): anything, a few times, with back-off.
- It was sent and no answer came: only what does no harm the second time. Publishes are among that,
  since every request carries an idempotency key, or every message its own. Claims are not:
  what the lost answer held comes back when its leases end.
- The broker has lost its root, or is closing: as if no answer had come.
- A repeated ack says that it is one, so that the broker can tell a message that the first one
  finished from one that was lost. A repeated ``create_queue`` may find what the first one made,
  and a repeated ``delete_queue`` nothing.

A client that knows the root and not the broker asks the store who serves it, whenever something has
to be repeated and while an answer is long in coming: so it follows a takeover. Where publishing and
queues are served by different processes, the one that is asked says where the other one is. Each
process that publishes knows its own keys alone. So a repeated publish says that it is one, and is
done only by the process that knows its key; if none of those that are asked does, it is in doubt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from opendata_queue.api.operation import Operation
from opendata_queue.api.system import AsyncSystem
from opendata_queue.filters import Filter
from opendata_queue.http import wire
from opendata_queue.http.token_hosts import TokenHosts
from opendata_queue.http.wire import MSGPACK, OPERATIONS, ErrorBody, WireOperation, error_of
from opendata_queue.model.checks import check_integer
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import (
    AccessProblem,
    ClosedError,
    FencedError,
    InvalidInputError,
    OdqError,
    OtherRoleError,
    QueueExistsError,
    QueueNotFoundError,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.model.messages import ClaimedMessage, NewMessage, receipts_of
from opendata_queue.model.options import QueueOptions
from opendata_queue.model.values import FailedMessage, Outcome, QueueInfo, Start

logger = logging.getLogger(__name__)

T = TypeVar("T")

Find = Callable[[], Awaitable[str | None]]
"""Says where a root is served; none if it is not."""

_ERROR: Final = msgspec.msgpack.Decoder(ErrorBody)
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = {one.name: msgspec.msgpack.Decoder(one.response) for one in OPERATIONS.values()}
_OK: Final = 200
_FORBIDDEN: Final = 403
# A broker keeps idle connections for longer: the client closes first, and so knows that it did.
_IDLE_SECONDS: Final = 15
_ATTEMPTS_TO_OPEN: Final = 3
_LOOK_AGAIN_MS: Final = 1_000
_LONG_WITHOUT_ANSWER_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """How a client reaches its broker. Times are milliseconds."""

    token: str | None = None
    hosts: Sequence[str] | None = None
    """Where the token may go beside the broker's own host, if a root or a broker says that it is
    served elsewhere: names, ``*.domain``, addresses and networks (``10.0.0.0/8``)."""
    connections: int = 256
    """At the same time; a claim that waits takes one."""
    connect_timeout_ms: int = 5_000
    request_timeout_ms: int = 60_000
    """For an answer, beside the time that a claim may wait."""
    attempts: int = 14
    """How often something is tried that may be repeated: by default for some 30 seconds, in which
    another broker may take over. Opening gives up sooner."""
    backoff_ms: int = 100
    """The pause before the second attempt, doubled for each further one, with jitter."""
    max_backoff_ms: int = 5_000
    poll_ms: int = 20_000
    """How long one request waits; a longer claim makes several."""
    repeat_publishes: bool = True
    """Give messages without an idempotency key one, so that a publish may be repeated."""
    repeat_claims: bool = False
    """Claim again when an answer was lost; what it held comes back when its leases end. Consumers
    and workers do so anyway, to outlive a broker that crashes."""
    tls: ssl.SSLContext | None = None
    """For a broker whose certificate the machine does not trust by itself."""

    def __repr__(self) -> str:
        return "ClientOptions(…)"  # a token must not reach a log

    def __post_init__(self) -> None:
        for name in (
            *("connections", "connect_timeout_ms", "request_timeout_ms", "attempts"),
            *("backoff_ms", "max_backoff_ms", "poll_ms"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidInputError(f"{name} is {value!r}, not 1 or more")


class _Unanswered(Exception):
    """A request that was sent, or may have been, and got no answer, or one that leaves doubt."""

    def __init__(self, message: str, error: OdqError | None = None) -> None:
        super().__init__(message)
        self.error = error or StoreUnavailableError(message, in_doubt=True)


class _Refused(Exception):
    """A request that the broker did not even try."""

    def __init__(self, error: OdqError, retry_after_ms: int | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_ms = retry_after_ms


class RemoteSystem(AsyncSystem):
    """A system that a broker offers at an ``http://`` or ``https://`` URL.

    With ``find`` the URL is that of a root, and ``find`` says where it is served.
    """

    def __init__(
        self, url: str, options: ClientOptions, clock: Clock, find: Find | None = None
    ) -> None:
        super().__init__()
        self._root = url
        self._find = find
        self._hosts = TokenHosts(
            options.hosts, broker=url if find is None else None, token=options.token is not None
        )
        self._looking = asyncio.Lock()
        self._looked_at_ms: int | None = None
        self.url = ""
        """Where the broker is; empty as long as that is not known."""
        self._move_to(url if find is None else "")
        self.consumer_id = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._options = options
        self._clock = clock
        self._session = _session(options)
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        options: ClientOptions | None = None,
        clock: Clock | None = None,
        find: Find | None = None,
    ) -> RemoteSystem:
        """Connect to a broker; an error if there is none, or it does not let us in."""
        if find is None:
            _check_url(url)
        system = cls(url, options or ClientOptions(), machine_clock(clock), find)
        try:
            await system._look_again()
            await system._reach()
        except BaseException:
            await system.close()
            raise
        return system

    async def _reach(self) -> None:
        """Any answer but a refusal of the token will do: not everybody may list queues."""
        attempts = self._options.attempts
        if self._find is None or not self.url:  # and not if a standby may be about to take over
            attempts = min(_ATTEMPTS_TO_OPEN, attempts)
        try:
            await self._call("list_queues", wire.ListQueues(), tries=_Tries(limit=attempts))
        except StoreAccessError as error:
            if error.problem is not AccessProblem.FORBIDDEN:
                raise
        except OtherRoleError:
            return  # it publishes, and no owner of the queues has an address
        except InvalidInputError:
            return  # it has more queues than are listed at once

    def _move_to(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._urls = {one.name: self.url + one.path for one in OPERATIONS.values()}
        self._sent_on: set[str] = set()

    def _send_on(self, operation: WireOperation, address: str | None) -> bool:
        """Ask another process of the root from now on; false if that is the one that was asked."""
        if address is None or self._urls[operation.name] == (url := _joined(address, operation)):
            return False
        self._hosts.check(address, said_by=self.url, now_at=self.url)
        self._urls[operation.name] = url
        self._sent_on.add(operation.name)
        return True

    def _come_back(self, operation: WireOperation) -> None:
        """The other process is in trouble: ask here again where it is."""
        if operation.name in self._sent_on:
            self._sent_on.discard(operation.name)
            self._urls[operation.name] = self.url + operation.path

    async def _look_again(self) -> None:
        """Find out where the root is served now. If that can't be found out, nothing changes."""
        if self._find is None:
            return
        async with self._looking:
            now_ms = self._clock.elapsed_ns() // 1_000_000
            last_ms = self._looked_at_ms
            if last_ms is not None and now_ms < last_ms + _LOOK_AGAIN_MS:
                return  # somebody else has just looked
            self._looked_at_ms = now_ms
            try:
                url = await self._find()
            except StoreUnavailableError as error:
                logger.info("could not look where %s is served: %s", self._root, error)
                return
            if url is None:
                return
            _check_url(url)
            if url.rstrip("/") != self.url:
                self._hosts.check(url, said_by=self._root, now_at=self.url)
                logger.info("%s is served at %s", self._root, url)
                self._move_to(url)

    # --- operations that are more than one request and its answer ---------------------------------

    async def _perform(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """All others: the arguments are sent, and the answer holds the result."""
        return await self._call(operation.name, OPERATIONS[operation.name].request_of(arguments))

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        keyed = self._options.repeat_publishes
        try:
            asked = _publish(messages, secrets.token_hex(8) if keyed else None)
        except (AttributeError, TypeError) as error:
            raise InvalidInputError(f"these are no messages: {error}") from error
        tries = _Tries(asked)
        ids: list[int] = await self._call("publish", asked, repeatable=keyed, tries=tries)
        return ids

    async def create_queue(
        self,
        name: str,
        *,
        filter: str = "",
        options: QueueOptions | None = None,
        start: Start = "now",
    ) -> QueueInfo:
        if options is None:
            options = QueueOptions()
        elif not isinstance(options, QueueOptions):
            raise InvalidInputError(f"options are {options!r}, not QueueOptions")
        asked = wire.CreateQueue(queue=name, filter=filter, options=asdict(options), start=start)
        tries = _Tries()
        try:
            made: QueueInfo = await self._call("create_queue", asked, tries=tries)
        except QueueExistsError:
            if not tries.unanswered:
                raise
            made = await self.get_queue(name)
            if made.options != options or not _same_filter(made.filter, filter):
                raise
        return made

    async def delete_queue(self, name: str) -> None:
        tries = _Tries()
        try:
            await self._call("delete_queue", wire.Queue(queue=name), tries=tries)
        except QueueNotFoundError:
            if not tries.unanswered:
                raise

    async def list_queues(
        self, *, prefix: str = "", after: str = "", limit: int | None = None
    ) -> list[str]:
        if limit is None and not prefix and not after:
            try:  # in the way that brokers of 0.1 understand, too
                answer: wire.QueueNames = await self._call("list_queues", wire.ListQueues())
            except InvalidInputError:
                pass  # there are more than are listed at once
            else:
                return answer.queues
        elif limit is not None:
            check_integer("limit", limit, 1, sys.maxsize)
        names: list[str] = []
        while True:
            count = wire.MAX_BATCH if limit is None else min(limit - len(names), wire.MAX_BATCH)
            asked = wire.ListQueues(prefix=prefix, after=after, limit=count)
            answer = await self._call("list_queues", asked)
            names += answer.queues
            if not answer.more or len(names) == limit:
                return names
            after = names[-1]

    async def claim(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str | None = None,
        lease_ms: int | None = None,
        wait_ms: int = 0,
    ) -> list[ClaimedMessage]:
        again = self._options.repeat_claims
        return await self._claim(name, count, consumer, lease_ms, wait_ms, again=again)

    async def _claim_in_loop(
        self, name: str, count: int, *, consumer: str | None, lease_ms: int | None, wait_ms: int
    ) -> list[ClaimedMessage]:
        return await self._claim(name, count, consumer, lease_ms, wait_ms, again=True)

    async def _claim(
        self,
        name: str,
        count: int,
        consumer: str | None,
        lease_ms: int | None,
        wait_ms: int,
        *,
        again: bool,
    ) -> list[ClaimedMessage]:
        """Claim, with as many requests as the wait takes; ``again`` after one that was lost."""
        asked = wire.Claim(
            queue=name,
            count=count,
            consumer=self.consumer_id if consumer is None else consumer,
            lease_ms=lease_ms,
            wait_ms=wait_ms,
        )
        if not isinstance(wait_ms, int) or wait_ms <= 0:
            return await self._claim_once(asked, again)
        until_ms = self._clock.elapsed_ns() // 1_000_000 + wait_ms
        while True:
            asked.wait_ms = min(wait_ms, self._options.poll_ms)
            claimed = await self._claim_once(asked, again)
            wait_ms = until_ms - self._clock.elapsed_ns() // 1_000_000
            if claimed or wait_ms <= 0:
                return claimed

    async def _claim_once(self, asked: wire.Claim, again: bool) -> list[ClaimedMessage]:
        wait_ms = asked.wait_ms if isinstance(asked.wait_ms, int) else 0
        claimed: list[ClaimedMessage] = await self._call(
            "claim", asked, wait_ms=wait_ms, repeatable=again
        )
        return claimed

    async def ack(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        asked = wire.Ack(queue=name, receipts=receipts_of(receipts))
        tries = _Tries(asked)
        outcomes: list[Outcome] = await self._call("ack", asked, tries=tries)
        return outcomes

    async def failed(
        self, name: str, *, filter: str | None = None, after_id: int = -1, limit: int = 100
    ) -> list[FailedMessage]:
        found: list[FailedMessage] = []
        while True:
            asked = wire.ListFailed(queue=name, filter=filter, after_id=after_id, limit=limit)
            answer: wire.FailedMessages = await self._call("failed", asked)
            found += answer.messages
            if not answer.more or not answer.messages:
                return found
            limit -= len(answer.messages)
            after_id = answer.messages[-1].message_id

    # --- closing ----------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._let_go()
        await self._session.close()

    # --- requests ---------------------------------------------------------------------------------

    async def _call(
        self,
        name: str,
        asked: wire.Request,
        *,
        wait_ms: int = 0,
        repeatable: bool | None = None,
        tries: _Tries | None = None,
    ) -> Any:
        """The result that the broker answers with, after as many attempts as are allowed."""
        operation = OPERATIONS[name]
        repeatable = operation.declared.repeatable if repeatable is None else repeatable
        tries = tries or _Tries()
        limit = tries.limit or self._options.attempts
        while True:
            try:
                return await self._send(operation, _encoded(asked), wait_ms)
            except OtherRoleError as other:  # nothing was done
                if tries.count >= limit or not self._send_on(operation, other.address):
                    raise
                tries.count += 1
                continue
            except _Refused as refused:
                if tries.count >= limit:
                    raise _last_word(refused, tries) from refused.__cause__
                pause_ms = refused.retry_after_ms
            except _Unanswered as unanswered:
                if not repeatable or tries.count >= limit:
                    raise unanswered.error from unanswered.__cause__
                tries.note_unanswered()
                pause_ms = None
            self._come_back(operation)
            await self._rest(tries, pause_ms)

    async def _rest(self, tries: _Tries, pause_ms: int | None) -> None:
        """Wait before the next attempt: for as long as the broker says, or a growing time."""
        grown_ms = self._options.backoff_ms << (tries.count - 1)
        longest_ms = self._options.max_backoff_ms
        chosen_ms = min(pause_ms or grown_ms, longest_ms)
        tries.count += 1
        await asyncio.sleep(chosen_ms * (1 - random.random() / 2) / 1000)
        await self._look_again()

    async def _send(self, operation: WireOperation, body: bytes, wait_ms: int) -> Any:
        if self._session.closed:
            raise ClosedError("the system is closed")
        if not self.url:
            nobody = StoreUnavailableError(
                f"nobody serves {self._root}: start a broker with `odq serve --store {self._root}`"
            )
            raise _Refused(nobody, None)
        if self._find is None:
            return await self._post(operation, body, wait_ms)
        return await self._unless_it_moves(self._post(operation, body, wait_ms))

    async def _unless_it_moves(self, sending: Coroutine[Any, Any, Any]) -> Any:
        """An answer; if it is long in coming, unless the root is served elsewhere by then.

        A broker that was stopped, or cut off, says nothing, and no connection ends.
        """
        asked_at = self.url
        request = asyncio.ensure_future(sending)
        try:
            while not request.done():
                await asyncio.wait([request], timeout=_LONG_WITHOUT_ANSWER_SECONDS)
                if request.done():
                    break
                await self._look_again()
                if self.url != asked_at:
                    raise _Unanswered(
                        f"no answer from {asked_at}, which is not the broker any more"
                    )
            return request.result()
        finally:
            if not request.done():
                request.cancel()
                await asyncio.wait([request])

    async def _post(self, operation: WireOperation, body: bytes, wait_ms: int) -> Any:
        timeout = aiohttp.ClientTimeout(
            total=(self._options.request_timeout_ms + wait_ms) / 1000,
            sock_connect=self._options.connect_timeout_ms / 1000,
        )
        url = self._urls[operation.name]
        try:
            async with self._session.post(
                url, data=body, timeout=timeout, allow_redirects=False
            ) as response:
                content = await response.read()
                status, headers = response.status, response.headers
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            refused = StoreUnavailableError(
                f"can't reach the broker at {_base(url)}: {_why(error)}"
            )
            raise _Refused(refused, None) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if self._session.closed:
                raise ClosedError("the system is closed") from error
            text = f"{type(error).__name__} {error}".strip()
            raise _Unanswered(f"no answer from the broker at {_base(url)}: {text}") from error
        if status == _OK:
            return self._decoded(operation, content)
        raise self._refusal(status, content, headers)

    def _decoded(self, operation: WireOperation, content: bytes) -> Any:
        try:
            return operation.result_of(_DECODERS[operation.name].decode(content))
        except msgspec.MsgspecError as error:
            raise StoreAccessError(
                f"{self.url} does not answer like a broker of this release: {error}"
            ) from error

    def _refusal(self, status: int, content: bytes, headers: Mapping[str, str]) -> Exception:
        """What to raise for an answer that says no."""
        if headers.get("Content-Type") != MSGPACK:
            return self._strange(status)
        try:
            body = _ERROR.decode(content)
        except msgspec.MsgspecError:
            return self._strange(status)
        if status == _FORBIDDEN and body.code is None:  # a broker of release 0.1
            body.code = AccessProblem.FORBIDDEN
        error = error_of(body)
        if body.refused and isinstance(error, StoreUnavailableError):
            return _Refused(error, body.retry_after_ms)
        if isinstance(error, FencedError | ClosedError):
            # Not ours: another broker may have the root, or this one soon again.
            return _Unanswered(str(error), error)
        return error

    def _strange(self, status: int) -> Exception:
        """Something between us and the broker has answered, or it is no broker at all."""
        if status >= 500:
            return _Unanswered(f"{self.url} answered with status {status}")
        return StoreAccessError(f"{self.url} answered with status {status}: is that a broker?")


class _Tries:
    """How one call has fared so far."""

    __slots__ = ("_asked", "count", "limit", "unanswered")

    def __init__(
        self, asked: wire.Ack | wire.Publish | None = None, *, limit: int | None = None
    ) -> None:
        self.count = 1
        self.limit = limit
        self.unanswered = False
        self._asked = asked

    def note_unanswered(self) -> None:
        """An attempt may have been done without our knowing."""
        self.unanswered = True
        if self._asked is not None:
            self._asked.retried = True


def _last_word(refused: _Refused, tries: _Tries) -> OdqError:
    """What to raise when the last attempt was refused: an earlier one may have been done."""
    if not tries.unanswered:
        return refused.error
    return StoreUnavailableError(
        f"{refused.error}; an earlier attempt got no answer", in_doubt=True
    )


def _session(options: ClientOptions) -> aiohttp.ClientSession:
    headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
    if options.token is not None:
        headers["Authorization"] = f"Bearer {options.token}"
    tls: ssl.SSLContext | bool = True if options.tls is None else options.tls
    connector = aiohttp.TCPConnector(
        limit=options.connections, keepalive_timeout=_IDLE_SECONDS, ssl=tls
    )
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )


def _check_url(url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.split("/")[0]:
        raise InvalidInputError(f"{url!r} is no URL of a broker, such as http://host:8080")


def _joined(address: str, operation: WireOperation) -> str:
    _check_url(address)
    return address.rstrip("/") + operation.path


def _base(url: str) -> str:
    return url.rpartition("/v1/")[0]


def _why(error: Exception) -> str:
    """What the machine said, without what the library tells of itself."""
    said = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return said.strerror or str(said) if isinstance(said, OSError) else str(said)


def _encoded(asked: wire.Request) -> bytes:
    try:
        return _ENCODER.encode(asked)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidInputError(f"the arguments can't be sent: {error}") from error


def _publish(messages: Sequence[NewMessage], key: str | None) -> wire.Publish:
    """What to send, so that it may be sent again if there is a ``key``.

    One key for the request is cheaper than one for each message, which is only needed beside
    messages that have keys of their own.
    """
    if key is None or not any(message.idempotency_key for message in messages):
        return wire.Publish(messages=[wire.MessageToPublish.of(one) for one in messages], key=key)
    return wire.Publish(
        messages=[
            wire.MessageToPublish.of(message, f"{key}-{index}")
            for index, message in enumerate(messages)
        ]
    )


def _same_filter(stored: str, given: str) -> bool:
    """Whether two filters say the same, however they are written."""
    return Filter.parse(stored).text == Filter.parse(given).text
