"""Blocks of sequence numbers (RFC 0001, Sequence block)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.errors import EncodingError
from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import Record

_U64_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqBlockKey(Record):
    """``01 02`` and nothing else: there is one such record in a database."""

    def encode(self) -> bytes:
        return RecordType.SEQ_BLOCK.prefix

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.SEQ_BLOCK)
        return cls()


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqBlock(IntegerRecord):
    """Every sequence below ``base_sequence + block_size`` may have been used.

    Layout, **big-endian**: base sequence ``u64``, block size ``u64``.
    """

    # Big-endian in a value: the one exception of the format.
    layout = IntegerRun(">", base_sequence="Q", block_size="Q")

    base_sequence: int
    block_size: int

    @property
    def end(self) -> int:
        """The first sequence that no block has covered yet."""
        return self.base_sequence + self.block_size

    def encode(self) -> bytes:
        block = IntegerRecord.encode(self)
        # What was packed, and not what a subclass of int may say that its sum is.
        end = sum(self.layout.struct.unpack(block))
        if end > _U64_MAX:
            raise EncodingError(_past_the_end(end), record="SeqBlock", field="block_size")
        return block

    @classmethod
    def read(cls, reader: Reader) -> Self:
        block = super(SeqBlock, cls).read(reader)
        if block.end > _U64_MAX:
            raise reader.error(_past_the_end(block.end), "block_size", 8)
        return block


def _past_the_end(end: int) -> str:
    return f"the block ends at {end}, past the last u64"
