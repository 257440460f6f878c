"""A system behind a broker: the same interface, over HTTP.

What is repeated after trouble, and what is not:

- Nothing was tried (no connection, or the broker said so): anything, a few times, with back-off.
- It was sent and no answer came: only what does no harm the second time. Publishes do none, since
  every request carries an idempotency key, or every message its own. Claims are not repeated:
  what the lost answer held comes back when its leases end.
- The broker has lost its root, or is closing: as if no answer had come.
- A repeated ack says that it is one, so that the broker can distinguish a message that the first
  one finished from one that was lost. A repeated ``create_queue`` may find what the first one
  made, and a repeated ``delete_queue`` nothing.

A client that knows the root and not the broker asks the store who serves it, whenever something has
to be repeated and while an answer is long in coming: so it follows a takeover. Where publishing and
queues are served by different processes, the one that is asked says where the other one is. Each
process that publishes knows its own keys alone. So a repeated publish says that it is one, and is
done only by the process that knows its key; if none of those that are asked does, it is in doubt.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from opendata_queue.api.operation import Operation
from opendata_queue.api.system import AsyncSystem
from opendata_queue.filters import Filter
from opendata_queue.http import wire
from opendata_queue.http.addresses import Addresses, Find, check_url
from opendata_queue.http.calls import Calls, Tries
from opendata_queue.http.client_options import ClientOptions
from opendata_queue.http.token_hosts import TokenHosts
from opendata_queue.http.wire import OPERATIONS
from opendata_queue.model.checks import check_integer
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import (
    AccessProblem,
    InvalidInputError,
    OtherRoleError,
    QueueExistsError,
    QueueNotFoundError,
    StoreAccessError,
)
from opendata_queue.model.messages import ClaimedMessage, NewMessage, receipts_of
from opendata_queue.model.options import QueueOptions
from opendata_queue.model.values import FailedMessage, Outcome, QueueInfo, Start

_ATTEMPTS_TO_OPEN: Final = 3


class RemoteSystem(AsyncSystem):
    """A system that a broker offers at an ``http://`` or ``https://`` URL.

    With ``find`` the URL is that of a root, and ``find`` says where it is served.
    """

    def __init__(
        self, url: str, options: ClientOptions, clock: Clock, find: Find | None = None
    ) -> None:
        super().__init__()
        hosts = TokenHosts(
            options.hosts, broker=url if find is None else None, token=options.token is not None
        )
        self.addresses = Addresses(url, hosts, clock, find)
        self.calls = Calls(options, self.addresses)
        self.consumer_id = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._options = options
        self._clock = clock
        self._closing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where the broker is; empty as long as that is not known."""
        return self.addresses.url

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
            check_url(url)
        system = cls(url, options or ClientOptions(), machine_clock(clock), find)
        try:
            await system.addresses.find_again()
            await system._reach()
        except BaseException:
            await system.close()
            raise
        return system

    async def _reach(self) -> None:
        """Any answer but a refusal of the token will do: not every token may list queues."""
        attempts = self._options.attempts
        # Where a standby may be about to take over, it is worth trying for longer.
        if not self.addresses.may_change or not self.url:
            attempts = min(_ATTEMPTS_TO_OPEN, attempts)
        try:
            await self.calls.call("list_queues", wire.ListQueues(), tries=Tries(limit=attempts))
        except StoreAccessError as error:
            if error.problem is not AccessProblem.FORBIDDEN:
                raise
        except OtherRoleError:
            return  # it publishes, and no owner of the queues has an address
        except InvalidInputError:
            return  # it has more queues than are listed at once

    # --- operations that are more than one request and its answer ---------------------------------

    async def _perform(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """All others: the arguments are sent, and the answer holds the result."""
        asked = OPERATIONS[operation.name].request_of(arguments)
        return await self.calls.call(operation.name, asked)

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        keyed = self._options.repeat_publishes
        try:
            asked = _publish(messages, secrets.token_hex(8) if keyed else None)
        except (AttributeError, TypeError) as error:
            raise InvalidInputError(f"these are no messages: {error}") from error
        tries = Tries(asked)
        ids: list[int] = await self.calls.call("publish", asked, repeatable=keyed, tries=tries)
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
        tries = Tries()
        try:
            made: QueueInfo = await self.calls.call("create_queue", asked, tries=tries)
        except QueueExistsError:
            if not tries.unanswered:
                raise
            made = await self.get_queue(name)
            if made.options != options or not _same_filter(made.filter, filter):
                raise
        return made

    async def delete_queue(self, name: str) -> None:
        tries = Tries()
        try:
            await self.calls.call("delete_queue", wire.Queue(queue=name), tries=tries)
        except QueueNotFoundError:
            if not tries.unanswered:
                raise

    async def list_queues(
        self, *, prefix: str = "", after: str = "", limit: int | None = None
    ) -> list[str]:
        if limit is None and not prefix and not after:
            try:  # in the way that brokers of 0.1 understand, too
                answer: wire.QueueNames = await self.calls.call("list_queues", wire.ListQueues())
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
            answer = await self.calls.call("list_queues", asked)
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
        claimed: list[ClaimedMessage] = await self.calls.call(
            "claim", asked, wait_ms=wait_ms, repeatable=again
        )
        return claimed

    async def ack(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        asked = wire.Ack(queue=name, receipts=receipts_of(receipts))
        tries = Tries(asked)
        outcomes: list[Outcome] = await self.calls.call("ack", asked, tries=tries)
        return outcomes

    async def failed(
        self, name: str, *, filter: str | None = None, after_id: int = -1, limit: int = 100
    ) -> list[FailedMessage]:
        found: list[FailedMessage] = []
        while True:
            asked = wire.ListFailed(queue=name, filter=filter, after_id=after_id, limit=limit)
            answer: wire.FailedMessages = await self.calls.call("failed", asked)
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
        await self.calls.close()


def _publish(messages: Sequence[NewMessage], key: str | None) -> wire.Publish:
    """What to send, so that it may be sent again if there is a ``key``.

    One key for the request is cheaper than one for each message, which is only needed next to
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
