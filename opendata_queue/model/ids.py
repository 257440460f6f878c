"""Ids of messages and numbers of shards (RFC 0002, RFC 0008, RFC 0009).

An id is the number of a shard, and a sequence number within it: ``shard << 32 | sequence``. Loops
that do it for every message use the two constants, all others the functions.
"""

from __future__ import annotations

from typing import Final

SEQUENCE_BITS: Final = 32
SEQUENCE_MASK: Final = (1 << SEQUENCE_BITS) - 1
SHARD_SEQUENCES: Final = 1 << SEQUENCE_BITS
"""How many sequence numbers a shard has."""


OWNERS_SHARD: Final = 0
"""Belongs to the owner of the root, and is never reserved."""

FIRST_BULK_SHARD: Final = 65_536
"""Shard numbers below are for live shards; from here on they are for bulk shards."""

LAST_SHARD: Final = (1 << 31) - 1
MAX_MESSAGE_ID: Final = (1 << 63) - 1


def is_bulk(shard: int) -> bool:
    return shard >= FIRST_BULK_SHARD


def shard_of(message_id: int) -> int:
    return message_id >> SEQUENCE_BITS


def sequence_of(message_id: int) -> int:
    return message_id & SEQUENCE_MASK


def first_id_of(shard: int) -> int:
    return shard << SEQUENCE_BITS


def message_id_of(shard: int, sequence: int) -> int:
    return shard << SEQUENCE_BITS | sequence
