"""Where a client sends its requests: it follows a takeover, and is sent on to other processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from opendata_queue.http.token_hosts import TokenHosts
from opendata_queue.http.wire import OPERATIONS, WireOperation
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError, StoreUnavailableError

logger = logging.getLogger(__name__)

Find = Callable[[], Awaitable[str | None]]
"""Says where a root is served; none if it is not."""

_FIND_AGAIN_MS: Final = 1_000


class Addresses:
    """The broker's URL, and those of operations that other processes of the root do.

    With ``find`` the URL that is given is that of a root, and ``find`` says where it is served.
    """

    def __init__(self, url: str, hosts: TokenHosts, clock: Clock, find: Find | None) -> None:
        self.root = url
        self._hosts = hosts
        self._clock = clock
        self._find = find
        self._finding = asyncio.Lock()
        self._asked_at_ms: int | None = None
        self.url = ""
        """Where the broker is; empty as long as that is not known."""
        self._move_to(url if find is None else "")

    @property
    def may_change(self) -> bool:
        """Whether another broker may serve the root at another time."""
        return self._find is not None

    def of(self, operation: WireOperation) -> str:
        return self._urls[operation.name]

    def _move_to(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._urls = {one.name: self.url + one.path for one in OPERATIONS.values()}
        self._sent_on: set[str] = set()

    def send_on(self, operation: WireOperation, address: str | None) -> bool:
        """Ask another process of the root from now on; false if that is the one that was asked."""
        if address is None or self._urls[operation.name] == (url := _joined(address, operation)):
            return False
        self._hosts.check(address, said_by=self.url, now_at=self.url)
        self._urls[operation.name] = url
        self._sent_on.add(operation.name)
        return True

    def come_back(self, operation: WireOperation) -> None:
        """The other process is in trouble: ask here again where it is."""
        if operation.name in self._sent_on:
            self._sent_on.discard(operation.name)
            self._urls[operation.name] = self.url + operation.path

    async def find_again(self) -> None:
        """Find out where the root is served now. If that can't be found out, nothing changes."""
        if self._find is None:
            return
        async with self._finding:
            now_ms = self._clock.elapsed_ns() // 1_000_000
            last_ms = self._asked_at_ms
            if last_ms is not None and now_ms < last_ms + _FIND_AGAIN_MS:
                return  # another call has just asked
            self._asked_at_ms = now_ms
            try:
                url = await self._find()
            except StoreUnavailableError as error:
                logger.info("could not find out where %s is served: %s", self.root, error)
                return
            if url is None:
                return
            check_url(url)
            if url.rstrip("/") != self.url:
                self._hosts.check(url, said_by=self.root, now_at=self.url)
                logger.info("%s is served at %s", self.root, url)
                self._move_to(url)


def check_url(url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.split("/")[0]:
        raise InvalidInputError(f"{url!r} is no URL of a broker, such as http://host:8080")


def _joined(address: str, operation: WireOperation) -> str:
    check_url(address)
    return address.rstrip("/") + operation.path
