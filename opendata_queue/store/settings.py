"""How we run SlateDB, and why not as it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import slatedb.uniffi as slatedb

from opendata_queue.errors import InvalidInputError

_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSettings:
    """What a user may want to turn. The defaults are good for a broker on S3 or a local disk."""

    fsync: bool = True
    """On ``file:///``: a commit is not acknowledged before its files would survive a power cut."""

    block_cache_bytes: int = 64 * _MIB
    """Memory for blocks of SST files, for each open database."""

    disk_cache_folder: Path | None = None
    """Where to keep parts of S3 objects on a local disk; off unless given."""

    disk_cache_bytes: int = 4 * 1024 * _MIB

    memtable_bytes: int = 32 * _MIB
    """Rows that are kept in memory before they become an SST file."""

    request_timeout_ms: int = 20_000
    """The longest that one request to S3 may take before it is tried again."""

    outage_timeout_ms: int = 60_000
    """How long a commit, an open or a close may take before the store counts as unavailable.

    Within it, requests that fail are tried again: a short outage only makes commits slow.
    """

    garbage_interval_ms: int = 15_000
    """How often files that are not needed any more are removed.

    Every commit makes a WAL object: SlateDB's own default of 600 s lets hundreds of thousands of
    them pile up.
    """

    garbage_age_ms: int = 60_000
    """How old such a file must be. Readers in other processes may still be replaying it."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 0:
                raise InvalidInputError(f"{name} is {value}, which is negative")
        if not self.memtable_bytes or not self.outage_timeout_ms or not self.request_timeout_ms:
            raise InvalidInputError("memtable_bytes and the timeouts must be over 0")

    def for_slatedb(self) -> slatedb.Settings:
        """SlateDB's settings for a database with a WAL that is flushed by us alone."""
        settings = slatedb.Settings.default()
        for key, value in self._values().items():
            settings.set(key, json.dumps(value))
        return settings

    def _values(self) -> dict[str, object]:
        values: dict[str, object] = {
            # Every commit flushes; a timer of SlateDB's own would only add WAL files.
            "flush_interval": None,
            "l0_sst_size_bytes": self.memtable_bytes,
            # Back-pressure from compaction comes late rather than as a stall after 8 files.
            "l0_max_ssts": 32,
            "l0_max_ssts_per_key": 32,
            "max_unflushed_bytes": 8 * self.memtable_bytes,
            # For ever: with a bound, SlateDB's background tasks close the database for good after
            # a few seconds of outage. We bound the wait of callers instead.
            "object_store_max_retries": None,
            # Collected by us, after the files that replace the garbage are on the disk.
            "garbage_collector_options": None,
        }
        if self.disk_cache_folder is not None:
            values["object_store_cache_options.root_folder"] = str(self.disk_cache_folder)
            values["object_store_cache_options.max_cache_size_bytes"] = self.disk_cache_bytes
        return values

    def block_cache(self) -> slatedb.DbCache:
        return slatedb.DbCache.new_foyer_cache(
            slatedb.FoyerCacheOptions(max_capacity=self.block_cache_bytes, shards=4)
        )

    def garbage_options(self) -> slatedb.GarbageCollectorOptions:
        old = slatedb.GarbageCollectorDirectoryOptions(
            min_age_ms=self.garbage_age_ms, dry_run=False
        )
        return slatedb.GarbageCollectorOptions(
            manifest_options=old,
            wal_options=old,
            compacted_options=old,
            compactions_options=old,
        )
