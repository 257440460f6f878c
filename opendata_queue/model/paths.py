"""Where things are in a root (RFC 0001, RFC 0002). The RFC of each file says what is in it."""

from __future__ import annotations

from typing import Final

QUEUES_PATH: Final = "queues/00000"
"""The database of the queue store."""
MESSAGES_FOLDER: Final = "messages"
BLOBS_FOLDER: Final = "blobs"
OWNERS_FOLDER: Final = "owners"
LIVE_SHARDS_FOLDER: Final = "shards"
BULK_SHARDS_FOLDER: Final = "shards/bulk"
COMMITS_FOLDER: Final = "commits"
FEATURES_FOLDER: Final = "features"


def messages_path(shard: int) -> str:
    """The database of a shard's messages and its log."""
    return f"{MESSAGES_FOLDER}/{shard:05}"


def blobs_path(shard: int) -> str:
    """The folder of a shard's large payloads."""
    return f"{BLOBS_FOLDER}/{shard:05}"
