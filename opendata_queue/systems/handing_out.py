"""Claims that become messages in the hands of consumers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import repeat
from typing import cast

from opendata_queue.log.all_shards import AllMessages
from opendata_queue.model.allowance import Allowance
from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.model.messages import ClaimedMessage, MessageFields
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.receipts import HeldMessage, Receipts
from opendata_queue.queues.state import Claim, Held
from opendata_queue.queues.store import QueueStore

logger = logging.getLogger(__name__)

_Read = MessageFields | CorruptStoreError | None


class HandingOut:
    """Claims messages, reads them, and gives them their receipts."""

    def __init__(self, queues: QueueStore, messages: AllMessages, receipts: Receipts) -> None:
        self._queues = queues
        self._messages = messages
        self._receipts = receipts

    async def claim(
        self,
        queue: StoredQueue,
        count: int,
        consumer: str,
        lease_ms: int | None,
        wait_ms: int,
        within: Allowance | None,
    ) -> tuple[list[ClaimedMessage], bool]:
        """What was claimed, and whether there was something, and all of it is gone."""
        name = queue.name
        held, durable = await self._queues.consumers.claim(
            name, count, consumer=consumer, lease_ms=lease_ms, wait_ms=wait_ms
        )
        if not held:
            # A consumer that asks again and again must leave the loop to others.
            await asyncio.sleep(0)
            return [], False
        try:
            # While the claim becomes durable.
            messages = await self._read([one.message_id for one in held], within)
            fitting = held if within is None else held[: len(messages)]
            claimed, gone, broken = self._paired(queue, fitting, messages)
            await durable()
            queue.check()
            if len(fitting) < len(held):
                await self._queues.consumers.release(name, held[len(fitting) :])
            if gone:  # past their retention, and dropped by the store before us
                await self._queues.consumers.drop_gone(name, gone)
            for claim, error in broken:
                # It rests like what fails, and is a dead letter in the end.
                logger.error("message %d can't be handed out: %s", claim.message_id, error)
                await self._queues.consumers.nack(name, [claim], error=str(error), delay_ms=None)
        except BaseException:
            self._queues.consumers.give_back_unseen(queue, held)
            raise
        return claimed, 0 < len(gone) == len(fitting)

    def claims_of(self, name: str, receipts: Sequence[str | ClaimedMessage]) -> list[Claim | Held]:
        """The claims that receipts prove, or messages as they were handed out."""
        queue = self._queues.queue(name)
        return self._receipts.of(queue.queue_id, queue.created_at_ms).read(receipts)

    async def _read(self, message_ids: list[int], within: Allowance | None) -> list[_Read]:
        """Messages, none for those that are gone, and what is wrong with broken ones."""
        try:
            return [*await self._messages.read_fitting(message_ids, within)]
        except CorruptStoreError:
            if within is not None:
                within.give_back()
        found: list[_Read] = []
        for message_id in message_ids:
            try:
                alone = await self._messages.read_fitting([message_id], within)
            except CorruptStoreError as error:
                found.append(error)
                continue
            if not alone:
                break
            found += alone
        return found

    def _paired(
        self, queue: StoredQueue, held: list[Held], messages: list[_Read]
    ) -> tuple[list[ClaimedMessage], list[Claim], list[tuple[Claim, CorruptStoreError]]]:
        """What to hand out, and the claims of messages that are gone, or broken."""
        receipts = self._receipts.of(queue.queue_id, queue.created_at_ms)
        name = queue.name
        if {*map(type, messages)} == {MessageFields}:  # most often, and column by column
            _, priorities, _, deadlines, tries, _, _ = zip(*held, strict=True)
            columns = zip(*cast("list[MessageFields]", messages), strict=True)
            lease = repeat(name), priorities, tries, deadlines, held, repeat(receipts)
            return list(map(HeldMessage, *columns, *lease)), [], []
        claimed: list[ClaimedMessage] = []
        gone: list[Claim] = []
        broken: list[tuple[Claim, CorruptStoreError]] = []
        for one, message in zip(held, messages, strict=True):
            if message is None:
                gone.append(one.claim())
            elif isinstance(message, CorruptStoreError):
                broken.append((one.claim(), message))
            else:
                _, priority, _, deadline, attempts, _, _ = one
                claimed.append(
                    HeldMessage(*message, name, priority, attempts, deadline, one, receipts)
                )
        return claimed, gone, broken
