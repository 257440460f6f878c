"""Loops over the messages of a queue."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Final, Self

from opendata_queue.api.ack_batcher import SharedAcks
from opendata_queue.api.claiming import ClaimingSystem
from opendata_queue.api.lease_keeper import LeaseKeeper
from opendata_queue.model.errors import ClosedError, InvalidInputError, OdqError, WrongContextError
from opendata_queue.model.messages import ClaimedMessage
from opendata_queue.model.values import Outcome

logger = logging.getLogger(__name__)

LEFT_THE_LOOP: Final = "the loop was left, by an exception or a break, with this message in hand"
MAX_BATCH: Final = 1_000


class RetryLater(Exception):
    """Raise it to have a message back after ``delay_ms``, instead of after the usual back-off.

    The attempt counts like any other that failed. Parts of a millisecond are rounded.
    """

    def __init__(self, delay_ms: float, reason: str = "") -> None:
        self.delay_ms = _whole_ms(delay_ms)
        super().__init__(reason or f"retry in {self.delay_ms} ms")


def _whole_ms(delay_ms: float) -> int:
    # Delays are often reckoned from seconds: 0.29 * 1000 is a bit less than 290.
    is_number = isinstance(delay_ms, int | float) and not isinstance(delay_ms, bool)
    if not is_number or not 0 <= delay_ms < math.inf:
        raise InvalidInputError(f"delay_ms is {delay_ms!r}, not 0 or more")
    return round(delay_ms)


async def nack_for(
    system: ClaimingSystem, queue: str, message: ClaimedMessage, error: BaseException
) -> Outcome:
    """Nack a message with an error's text, and the delay if it asks for one that can be had."""
    text = failure_text(error)
    # A class of a user's may come without it.
    delay_ms = getattr(error, "delay_ms", None) if isinstance(error, RetryLater) else None
    try:
        (outcome,) = await system.nack(queue, message, error=text, delay_ms=delay_ms)
    except InvalidInputError as refusal:
        if delay_ms is None:
            raise
        logger.warning("a message of queue %s rests as long as usual: %s", queue, refusal)
        (outcome,) = await system.nack(queue, message, error=text)
    return outcome


def failure_text(error: BaseException) -> str:
    """What is kept of an error."""
    try:
        text = str(error)
    except Exception:  # an error of a user's may do anything
        text = ""
    if text and isinstance(error, RetryLater):
        return text
    name = type(error).__name__
    return f"{name}: {text}" if text else name


class AsyncConsumer:
    """The messages of a queue, one after the other.

        async with system.consumer("emails") as messages:
            async for message in messages:
                await send(message.payload)

    A message is acked when the loop asks for the next one, and when the block is left without an
    exception. An exception that leaves the block is a nack with its text; cancellation and other
    interruptions release the message, uncounted. ``nack`` and ``release`` decide about the message
    in hand without leaving the loop. Messages that were claimed and not handed out are released
    when the block is left. Leases are extended for as long as the body takes.

    Without ``async with``, a loop can't see why it was left: a message in hand is then always
    nacked, after cancellation too, as soon as Python collects the loop's iterator.
    """

    def __init__(
        self,
        system: ClaimingSystem,
        queue: str,
        *,
        batch: int = 10,
        lease_ms: int | None = None,
        wait_ms: int = 10_000,
        consumer: str | None = None,
        limit: int | None = None,
        idle_ms: int | None = None,
    ) -> None:
        if not isinstance(batch, int) or not 0 < batch <= MAX_BATCH:
            raise InvalidInputError(f"batch is {batch!r}, not within 1 to {MAX_BATCH}")
        if not isinstance(wait_ms, int) or wait_ms < 1:
            raise InvalidInputError(f"wait_ms is {wait_ms!r}, not 1 or more")
        for name, value in (("limit", limit), ("idle_ms", idle_ms)):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise InvalidInputError(f"{name} is {value!r}, not 0 or more")
        self.queue = queue
        self._system = system
        self._batch = batch
        self._wait_ms = wait_ms
        self._consumer = consumer
        self._limit = limit
        self._idle_ms = idle_ms
        self._keeper = LeaseKeeper(system, queue, lease_ms)
        self._ready: deque[ClaimedMessage] = deque()
        self._in_hand: ClaimedMessage | None = None
        self._shared_acks = SharedAcks(system, queue)
        self._acks: dict[asyncio.Future[Outcome], ClaimedMessage] = {}
        self._handed_out = 0
        self._looping = False
        self._in_block = False
        self._closed = False

    # --- looping ----------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncGenerator[ClaimedMessage, None]:
        self.begin()
        try:
            while (message := await self.take()) is not None:
                yield message
        except BaseException as error:
            await self.abandon(error)
            raise
        await self.end()

    async def __aenter__(self) -> Self:
        self._in_block = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.leave(error)

    async def ack(self) -> bool:
        """Finish the message in hand now, and know that it is durable; false if it was lost."""
        message = self._put_down()
        if message is None:
            return False
        outcome = await self._shared_acks.ack(message)
        self._check(message, outcome)
        return outcome == "ok"

    async def nack(self, error: str = "", *, delay_ms: int | None = None) -> bool:
        """Report that the message in hand failed, and stay in the loop; false if it was lost."""
        message = self._put_down()
        if message is None:
            return False
        (outcome,) = await self._system.nack(self.queue, message, error=error, delay_ms=delay_ms)
        return outcome == "ok"

    async def release(self) -> None:
        """Give the message in hand back, and stay in the loop."""
        message = self._put_down()
        if message is not None:
            await self._system.release(self.queue, message)

    async def close(self) -> None:
        """Give everything back, the message in hand too. Its loop can't go on."""
        self._closed = True
        try:
            await self.release()
            await self._stop()
        except OdqError as error:
            self._could_not_settle(error)

    # --- the steps of a loop ----------------------------------------------------------------------

    def begin(self) -> None:
        """A loop starts."""
        if self._looping:
            raise WrongContextError("this consumer is in a loop already: make one for each loop")
        self._looping = True
        self._handed_out = 0

    async def take(self) -> ClaimedMessage | None:
        """The next message; none at the end. The one before it is done."""
        if self._closed:
            raise ClosedError(f"this consumer of queue {self.queue} is closed")
        await self._finish_turn()
        if self._limit is not None and self._handed_out >= self._limit:
            return None
        self._drop_lost()
        if not self._ready:
            claimed = await self._claim()
            if not claimed:
                return None
            self._keeper.hold(claimed)
            self._ready.extend(claimed)
        self._in_hand = self._ready.popleft()
        self._handed_out += 1
        return self._in_hand

    async def end(self) -> None:
        """A loop is over, because there is nothing more to come."""
        self._looping = False
        if not self._in_block:
            await self._stop()

    async def abandon(self, error: BaseException) -> None:
        """A loop was left. Errors are logged: there may be no caller to raise them to."""
        self._looping = False
        if self._in_block:
            return  # ``leave`` follows, and gets the reason
        try:
            if isinstance(error, GeneratorExit):  # Python gives no other reason
                await self.nack(LEFT_THE_LOOP)
            else:  # on the way to the next message, which the loop has not seen
                await self.release()
            await self._stop()
        except OdqError as error:
            self._could_not_settle(error)

    async def leave(self, error: BaseException | None) -> None:
        """The block is left."""
        self._in_block = False
        try:
            if error is None:
                await self.ack()
            elif isinstance(error, Exception):
                await self._nack_for(error)
            else:
                await self.release()
            await self._stop()
        except OdqError as trouble:
            if error is None:
                raise
            self._could_not_settle(trouble)  # and don't hide the error that is under way

    async def _nack_for(self, error: Exception) -> None:
        message = self._put_down()
        if message is not None:
            await nack_for(self._system, self.queue, message, error)

    async def _finish_turn(self) -> None:
        """Ack in the background, so that acks of a batch can share a commit."""
        message = self._put_down()
        if message is not None:
            self._acks[self._shared_acks.ack(message)] = message
        while len(self._acks) >= self._batch:
            await asyncio.wait(self._acks, return_when=asyncio.FIRST_COMPLETED)
            self._check_acks()
        self._check_acks()

    def _check_acks(self) -> None:
        """Raise what went wrong with those that are done."""
        for ack in [ack for ack in self._acks if ack.done()]:
            self._check(self._acks.pop(ack), ack.result())

    def _check(self, message: ClaimedMessage, outcome: Outcome) -> None:
        if outcome != "ok":
            self._warn_of_lost(message)

    def _put_down(self) -> ClaimedMessage | None:
        """The message in hand, if it is still ours."""
        message, self._in_hand = self._in_hand, None
        if message is None or self._keeper.drop(message):
            return message
        self._warn_of_lost(message)
        return None

    def _warn_of_lost(self, message: ClaimedMessage) -> None:
        logger.warning(
            "message %d of queue %s was not acked: its lease was lost",
            message.message_id,
            self.queue,
        )

    def _could_not_settle(self, error: OdqError) -> None:
        logger.warning(
            "messages of queue %s come back when their leases end: %s", self.queue, error
        )

    def _drop_lost(self) -> None:
        while self._ready and not self._keeper.holds(self._ready[0]):
            self._ready.popleft()

    async def _claim(self) -> list[ClaimedMessage]:
        """The next batch; empty when it has been idle for long enough."""
        count = self._batch
        if self._limit is not None:
            count = min(count, self._limit - self._handed_out)
        left_ms = self._idle_ms
        while True:
            # Idle is what the claims have waited, by whichever clock they wait.
            wait_ms = self._wait_ms if left_ms is None else min(self._wait_ms, left_ms)
            claimed = await self._keeper.claim(count, consumer=self._consumer, wait_ms=wait_ms)
            if self._closed:
                await self._system.release(self.queue, *claimed)
                raise ClosedError(f"this consumer of queue {self.queue} is closed")
            if claimed:
                return claimed
            if left_ms is not None:
                left_ms -= wait_ms
                if left_ms <= 0:
                    return []

    async def _stop(self) -> None:
        """Release what was not handed out, and wait for the acks."""
        waiting = [message for message in self._ready if self._keeper.drop(message)]
        self._ready.clear()
        try:
            if waiting:
                await self._system.release(self.queue, *waiting)
            if self._acks:
                await asyncio.wait(self._acks)
            self._check_acks()
        finally:
            self._acks.clear()
            await self._keeper.stop()
