"""Requests to a broker and their answers, and what is repeated after trouble (see ``client``)."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from opendata_queue.http import wire
from opendata_queue.http.addresses import Addresses
from opendata_queue.http.client_options import ClientOptions
from opendata_queue.http.errors import ErrorBody, error_of
from opendata_queue.http.wire import MSGPACK, OPERATIONS, WireOperation
from opendata_queue.model.errors import (
    AccessProblem,
    ClosedError,
    FencedError,
    InvalidInputError,
    OdqError,
    OtherRoleError,
    StoreAccessError,
    StoreUnavailableError,
)

_ERROR: Final = msgspec.msgpack.Decoder(ErrorBody)
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = {one.name: msgspec.msgpack.Decoder(one.response) for one in OPERATIONS.values()}
_OK: Final = 200
_FORBIDDEN: Final = 403
# A broker keeps idle connections for longer: the client closes first, and so knows that it did.
_IDLE_SECONDS: Final = 15
_LONG_WITHOUT_ANSWER_SECONDS: Final = 5.0


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


class Tries:
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
        """Remember that an attempt got no answer: it may have been done."""
        self.unanswered = True
        if self._asked is not None:
            self._asked.retried = True


class Calls:
    """Calls the operations of a broker; several at the same time, over its own connections."""

    def __init__(self, options: ClientOptions, addresses: Addresses) -> None:
        self._options = options
        self._addresses = addresses
        self.session = _session(options)

    async def call(
        self,
        name: str,
        asked: wire.Request,
        *,
        wait_ms: int = 0,
        repeatable: bool | None = None,
        tries: Tries | None = None,
    ) -> Any:
        """The result that the broker answers with, after as many attempts as are allowed."""
        operation = OPERATIONS[name]
        repeatable = operation.declared.repeatable if repeatable is None else repeatable
        tries = tries or Tries()
        limit = tries.limit or self._options.attempts
        while True:
            try:
                return await self._send(operation, _encoded(asked), wait_ms)
            except OtherRoleError as other:  # nothing was done
                if tries.count >= limit or not self._addresses.send_on(operation, other.address):
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
            self._addresses.come_back(operation)
            await self._rest(tries, pause_ms)

    async def _rest(self, tries: Tries, pause_ms: int | None) -> None:
        """Wait before the next attempt: for as long as the broker says, or a growing time."""
        grown_ms = self._options.backoff_ms << (tries.count - 1)
        longest_ms = self._options.max_backoff_ms
        chosen_ms = min(pause_ms or grown_ms, longest_ms)
        tries.count += 1
        await asyncio.sleep(chosen_ms * (1 - random.random() / 2) / 1000)
        await self._addresses.find_again()

    async def _send(self, operation: WireOperation, body: bytes, wait_ms: int) -> Any:
        if self.session.closed:
            raise ClosedError("the system is closed")
        if not self._addresses.url:
            root = self._addresses.root
            unserved = StoreUnavailableError(
                f"no broker serves {root}: start one with `odq serve --store {root}`"
            )
            raise _Refused(unserved, None)
        if not self._addresses.may_change:
            return await self._post(operation, body, wait_ms)
        return await self._unless_it_moves(self._post(operation, body, wait_ms))

    async def _unless_it_moves(self, sending: Coroutine[Any, Any, Any]) -> Any:
        """The answer; an error if it is long in coming, and the root is served elsewhere by then.

        A broker that was stopped, or cut off, sends nothing, and its connections stay open.
        """
        asked_at = self._addresses.url
        request = asyncio.ensure_future(sending)
        try:
            while not request.done():
                await asyncio.wait([request], timeout=_LONG_WITHOUT_ANSWER_SECONDS)
                if request.done():
                    break
                await self._addresses.find_again()
                if self._addresses.url != asked_at:
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
        url = self._addresses.of(operation)
        try:
            async with self.session.post(
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
            if self.session.closed:
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
                f"{self._addresses.url} does not answer like a broker of this release: {error}"
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
        url = self._addresses.url
        if status >= 500:
            return _Unanswered(f"{url} answered with status {status}")
        return StoreAccessError(f"{url} answered with status {status}: is that a broker?")

    async def close(self) -> None:
        await self.session.close()


def _last_word(refused: _Refused, tries: Tries) -> OdqError:
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


def _base(url: str) -> str:
    return url.rpartition("/v1/")[0]


def _why(error: Exception) -> str:
    """The reason that the system gave, without the text that the library adds."""
    said = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return said.strerror or str(said) if isinstance(said, OSError) else str(said)


def _encoded(asked: wire.Request) -> bytes:
    try:
        return _ENCODER.encode(asked)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidInputError(f"the arguments can't be sent: {error}") from error
