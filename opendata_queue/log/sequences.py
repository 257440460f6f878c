"""Handing out sequence numbers in blocks (RFC 0001, Sequence block; RFC 0002, Sequences)."""

from __future__ import annotations

from typing import Final

from odq_encodings import SeqBlock, SeqBlockKey
from opendata_queue.model.errors import ShardFullError
from opendata_queue.model.ids import SHARD_SEQUENCES
from opendata_queue.store import DatabaseReads

BLOCK_SIZE: Final = 4_096

KEY: Final = SeqBlockKey().encode()


class Sequences:
    """The numbers of one shard: taken one after the other, from blocks that are durable already.

    Writing and committing a block's record is the caller's part: ``next_block`` says what to
    write, ``block_is_durable`` that it has been.
    """

    __slots__ = ("_durable_end", "_planned_end", "next")

    def __init__(self, last: SeqBlock | None) -> None:
        """Continue behind ``last``, the block that the store knows of."""
        self.next = 0 if last is None else last.end
        self._durable_end = self.next
        self._planned_end = self.next

    @classmethod
    async def load(cls, database: DatabaseReads) -> Sequences:
        value = await database.get(KEY)
        return cls(None if value is None else database.decode(SeqBlock.decode, KEY, value))

    @property
    def available(self) -> int:
        """How many numbers can be taken right now."""
        return self._durable_end - self.next

    @property
    def running_low(self) -> bool:
        """Whether the next block should be written along with whatever is written next."""
        return (
            self._planned_end == self._durable_end < SHARD_SEQUENCES
            and self.available < BLOCK_SIZE // 2
        )

    def take(self, count: int) -> int:
        """Take ``count`` numbers; returns the first. They must be available."""
        if count > self.available:
            raise AssertionError(f"{count} sequences taken, {self.available} available")
        first = self.next
        self.next += count
        return first

    def next_block(self, count: int = 0) -> SeqBlock:
        """The block to write next, so large that ``count`` more numbers become available."""
        left = self._planned_end - self.next
        size = max(BLOCK_SIZE, count - left)
        base = self._planned_end
        if base + count - left > SHARD_SEQUENCES or base >= SHARD_SEQUENCES:
            raise ShardFullError(f"the shard has given out {self.next} of {SHARD_SEQUENCES}")
        size = min(size, SHARD_SEQUENCES - base)
        self._planned_end = base + size
        return SeqBlock(base_sequence=base, block_size=size)

    def block_is_durable(self, block: SeqBlock) -> None:
        self._durable_end = max(self._durable_end, block.end)
