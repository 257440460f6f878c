"""The first two bytes of every key: format version, record type (RFC 0001, Record types)."""

from __future__ import annotations

import enum
from typing import Final

VERSION: Final = 0x01
SEALED_VERSION: Final = 0x02
"""The key version of sealed buckets of done and failed messages."""

MAX_KEY_BYTES: Final = 0xFFFF
"""Our own limit, far above any real key."""


class RecordType(enum.IntEnum):
    """The type byte. The messages database and the queue store both use 01 and 02.

    ``PAYLOAD`` and ``METADATA_LOG_ENTRY`` share a byte, as do ``SEQ_BLOCK`` and
    ``ACTIVE_MESSAGES``; the length of the key tells them apart (see ``rows``).
    """

    PAYLOAD = 0x01
    SEQ_BLOCK = 0x02
    DONE_MESSAGES = 0x03
    FAILED_MESSAGES = 0x04
    ATTEMPTS = 0x05
    QUEUE_CONFIG = 0x06
    IDEMPOTENCY = 0x07
    BLOB_REFERENCE = 0x08
    QUEUE_OPTIONS = 0x09
    QUEUE_COUNTERS = 0x0A
    BACKLOG = 0x0B
    SCHEDULE = 0x0C
    FAILURE = 0x0D
    CURSOR = 0x0E
    REPLAY = 0x0F
    CLOCK = 0x10
    BULK_SHARD = 0x11
    BULK_JOB = 0x12
    BULK_NUMBERS = 0x13
    EXPIRY = 0x14
    MESSAGE_BLOB = 0x15
    RETENTION_POSITION = 0x16
    RETENTION_FLOOR = 0x17
    SYSTEM_OPTIONS = 0x18
    FINISHED = 0x19
    EXPIRED_ENTRIES = 0x1A
    BULK_EXPIRY = 0x1B
    BULK_FILED = 0x1C
    BULK_WAITING = 0x1D

    METADATA_LOG_ENTRY = 0x01
    ACTIVE_MESSAGES = 0x02

    @property
    def prefix(self) -> bytes:
        return bytes((VERSION, self))
