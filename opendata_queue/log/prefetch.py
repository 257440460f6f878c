"""Messages that will be claimed soon, read from the store before a claim needs them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from opendata_queue.log.cache import MESSAGE_OVERHEAD_BYTES
from opendata_queue.model.allowance import ReadStep
from opendata_queue.model.errors import OdqError
from opendata_queue.model.messages import MessageFields
from opendata_queue.runtime.aio import end_tasks

logger = logging.getLogger(__name__)

_READERS_AT_MOST: Final = 4
# A scan costs some hundred microseconds however short it is: read many messages with one, as long
# as they are small.
_FEWEST_AT_ONCE: Final = 16
_MOST_AT_ONCE: Final = 1_024
_FIRST_GUESS_BYTES: Final = 16 * 1024

Read = Callable[[Collection[int], ReadStep], Awaitable[dict[int, MessageFields]]]


class ReadAhead:
    """Reads messages that are expected to be claimed, and keeps them; bounded in bytes.

    What is not taken makes room for what is expected later. While it is full with messages that
    are still being read, nothing more is read ahead: the claim reads the rest itself.
    """

    def __init__(self, read: Read, limit_bytes: int) -> None:
        self._read = read
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._messages: OrderedDict[int, tuple[MessageFields, int]] = OrderedDict()
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._usual_bytes = _FIRST_GUESS_BYTES

    def __contains__(self, message_id: int) -> bool:
        """Whether a message was read, or is being read."""
        return message_id in self._messages or message_id in self._under_way

    def expect(self, message_ids: Iterable[int]) -> None:
        """Start to read messages, unless that is too much."""
        if not self._limit_bytes or len(self._tasks) >= _READERS_AT_MOST:
            return
        ids = [i for i in message_ids if i not in self._messages and i not in self._under_way]
        if not ids:
            return
        task = asyncio.create_task(self._run(ids), name="read ahead")
        self._tasks.add(task)
        self._under_way |= dict.fromkeys(ids, task)
        task.add_done_callback(self._tasks.discard)

    async def take(self, message_ids: Collection[int]) -> dict[int, MessageFields]:
        """Those of the messages that were read ahead, or are being read."""
        tasks = {self._under_way[one] for one in message_ids if one in self._under_way}
        if tasks:
            await asyncio.wait(tasks)
        taken = {}
        for one in message_ids:
            kept = self._messages.pop(one, None)
            if kept is not None:
                taken[one], size_bytes = kept
                self._size_bytes -= size_bytes
        return taken

    async def close(self) -> None:
        """Stop reading."""
        await end_tasks(self._tasks)

    async def _run(self, ids: list[int]) -> None:
        try:
            read_bytes = start = 0
            while start < len(ids) and read_bytes < self._limit_bytes // _READERS_AT_MOST:
                some = ids[start : start + self._at_once()]
                start += len(some)
                # Some may be larger than those before them: claims read these themselves.
                step = ReadStep(self._limit_bytes // _READERS_AT_MOST - read_bytes)
                messages = await self._read(some, step)
                if messages:
                    size_bytes = self._keep(messages)
                    read_bytes += size_bytes
                    self._usual_bytes = size_bytes // len(messages)
        except OdqError as error:
            logger.info("could not read ahead: %s", error)  # the claim that reads them raises it
        finally:
            for one in ids:
                self._under_way.pop(one, None)

    def _at_once(self) -> int:
        """How many messages one reader may have in its hands, by what they weighed lately."""
        fitting = self._limit_bytes // _READERS_AT_MOST // max(1, self._usual_bytes)
        return max(_FEWEST_AT_ONCE, min(fitting, _MOST_AT_ONCE))

    def _keep(self, messages: dict[int, MessageFields]) -> int:
        """Keep messages; returns their size."""
        added_bytes = 0
        last: tuple[tuple[str, str], ...] = ()
        headers_bytes = 0
        for one, message in messages.items():
            if message.headers is not last:  # most often they share them
                last = message.headers
                headers_bytes = sum(len(key) + len(value) for key, value in last)
            size_bytes = MESSAGE_OVERHEAD_BYTES + headers_bytes
            size_bytes += len(message.payload or message.payload_uri or b"")
            self._messages[one] = message, size_bytes
            added_bytes += size_bytes
        self._size_bytes += added_bytes
        while self._size_bytes > self._limit_bytes:
            _, (_, dropped_bytes) = self._messages.popitem(last=False)
            self._size_bytes -= dropped_bytes
        return added_bytes
