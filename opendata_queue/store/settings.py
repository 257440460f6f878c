"""How we run SlateDB, and why not as it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import InvalidInputError

_MIB = 1024 * 1024
# Larger ones are fewer for a reader to merge; three of them may be in memory at a time.
_BULK_SST_BYTES = 64 * _MIB
_UNLIMITED = 1 << 20
_LEAST_SST_BYTES = _MIB
# How much of each of the files that it merges, eight or so, a compaction has in memory; on S3 so
# much that it does not wait for each request.
_LOCAL_FETCH = (1, _MIB // 2)
_S3_FETCH = (2, _MIB)
_S3_POLL_MS = 15_000
_S3_CROWDED_POLL_MS = 5_000
_LOCAL_POLL_MS = 1_000
_L0_FILES = 32
# There are more of them, and most are small: see ``ReplayLength``.
_S3_L0_FILES = 64

# For what is replayed at open: it was at most max_unflushed_bytes, of eight memtables.
_REPLAYED_FILES = 16
# How often a compaction gives a sign of life, and how old the last one must be for it to be begun
# again: one that was killed keeps others from starting. With SlateDB's 30 s an open had to wait for
# so long. A sign of life is a put, and only long compactions need one.
_LOCAL_HEARTBEAT_MS = (1_000, 6_000)
_S3_HEARTBEAT_MS = (5_000, 20_000)

CROWDED_FILES = _L0_FILES // 2
"""Files that wait for a compaction; with two or four times as many a writer waits for one, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSettings:
    """What a user may want to turn. The defaults are good for a broker on S3 or a local disk."""

    fsync: bool = True
    """On ``file:///``: a commit is not acknowledged before its files would survive a power cut."""

    journal_ms: int = 10
    """On ``file:///``: how long commits are in a journal alone before SlateDB has them, too, and
    readers in other processes can see them (RFC 0011). With 0 there is no journal, as on a file
    system over a network: every commit makes a file, and takes five times as long."""

    block_cache_bytes: int = 64 * _MIB
    """Memory for blocks of SST files, for each open database."""

    disk_cache_folder: Path | None = None
    """Where to keep parts of S3 objects on a local disk; off unless given."""

    disk_cache_bytes: int = 4 * 1024 * _MIB

    memtable_bytes: int = 32 * _MIB
    """Rows that are kept in memory before they become an SST file, and the largest file that a
    compaction makes.

    Of a file that holds a row, the index and the filter are read whole, and kept: about 1 MiB of a
    file of 32 MiB. So it does not matter to a reader how many files there are."""

    request_timeout_ms: int = 20_000
    """The longest that one request to S3 may take before it is tried again."""

    outage_timeout_ms: int = 60_000
    """How long a commit, an open or a close may take before the store counts as unavailable.

    Within it, requests that fail are tried again: a short outage only makes commits slow.
    """

    garbage_interval_ms: int = 15_000
    """How often files that are not needed any more are removed.

    Every commit makes a WAL object: SlateDB's own default of 600 s lets hundreds of thousands of
    them pile up. Where there were less than sixteen commits, it is done more rarely, up to every
    sixteenth time: a round is six lists and some twenty reads on S3. It ends when all that the last
    commit has left behind is gone.
    """

    garbage_age_ms: int = 60_000
    """How old such a file must be. Readers in other processes may still be replaying it."""

    unguarded_age_ms: int = 900_000
    """How old a manifest must be on an S3 that can't overwrite an object by its ETag (RFC 0015)."""

    compaction_poll_ms: int | None = None
    """How often SlateDB polls whether there are files to compact, and what has been compacted;
    every 15 s on S3, where that is eight reads for each database, busy or not, and every second
    elsewhere. It can't be changed while a database is open.

    From when files are there to when a writer knows that they are one takes three polls, and the
    compaction. Meanwhile 32 files of ``memtable_bytes`` may be written, a GiB: a system that writes
    over 20 MiB a second to S3 for minutes should poll more often.

    Opening and closing a root again and again leaves a file each time: when there are too many, a
    close waits for two or three polls. So on S3 it is every 5 s where many files wait at open."""

    replaced_files_kept_ms: int = 900_000
    """How long files that a compaction has replaced are kept for scans that still read them."""

    ttl_grace_ms: int = 3_600_000
    """How long after the end of its retention SlateDB keeps a row, for clocks that disagree."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 0:
                raise InvalidInputError(f"{name} is {value}, which is negative")
        if not self.memtable_bytes or not self.outage_timeout_ms or not self.request_timeout_ms:
            raise InvalidInputError("memtable_bytes and the timeouts must be over 0")

    def for_slatedb(self, *, on_s3: bool, waiting_files: int = 0) -> slatedb.Settings:
        """SlateDB's settings for a database with a WAL that is flushed by us alone.

        ``waiting_files`` are there for a compaction now.
        """
        return _settings_of(self._values(on_s3=on_s3, waiting_files=waiting_files))

    def for_bulk_load(self) -> slatedb.Settings:
        """SlateDB's settings for a database that is written once, by one process."""
        return _settings_of(
            self._values(on_s3=True)
            | {
                "wal_enabled": False,
                "compactor_options": None,
                "l0_sst_size_bytes": _BULK_SST_BYTES,
                # Without a compactor SlateDB would stop for ever at a limit.
                "l0_max_ssts": _UNLIMITED,
                "l0_max_ssts_per_key": _UNLIMITED,
                "max_unflushed_bytes": 3 * _BULK_SST_BYTES,
            }
        )

    def _values(self, *, on_s3: bool, waiting_files: int = 0) -> dict[str, object]:
        crowded = waiting_files >= CROWDED_FILES
        poll_ms = self.compaction_poll_ms
        if poll_ms is None:
            on_s3_ms = _S3_CROWDED_POLL_MS if crowded else _S3_POLL_MS
            poll_ms = on_s3_ms if on_s3 else _LOCAL_POLL_MS
        # So many at least that an open does not have to wait for a compaction.
        l0_files = max(_S3_L0_FILES if on_s3 else _L0_FILES, waiting_files + _REPLAYED_FILES)
        beat_ms, silence_ms = _S3_HEARTBEAT_MS if on_s3 else _LOCAL_HEARTBEAT_MS
        fetches, fetched_bytes = _S3_FETCH if on_s3 else _LOCAL_FETCH
        values: dict[str, object] = {
            # We flush; a timer of SlateDB's own would only add WAL files.
            "flush_interval": None,
            "l0_sst_size_bytes": self.memtable_bytes,
            # Back-pressure from compaction comes late rather than as a stall after 8 files.
            "l0_max_ssts": l0_files,
            "l0_max_ssts_per_key": l0_files,
            "max_unflushed_bytes": 8 * self.memtable_bytes,
            # For ever: with a bound, SlateDB's background tasks close the database for good after
            # a few seconds of outage. We bound the wait of callers instead.
            "object_store_max_retries": None,
            # A writer that was replaced finds out when it flushes. This is for what compaction has
            # done, and makes four requests for each poll.
            "manifest_poll_interval": f"{poll_ms}ms",
            # One thread for each: with more, a large compaction leaves nothing to callers.
            "compactor_options.worker.max_subcompactions": 1,
            # A large one, and at the same time a small one that keeps writers from having to wait.
            "compactor_options.max_concurrent_compactions": 2,
            "compactor_options.worker.max_concurrent_compactions": 2,
            "compactor_options.worker.max_sst_size": max(_LEAST_SST_BYTES, self.memtable_bytes),
            "compactor_options.worker.max_fetch_tasks": fetches,
            "compactor_options.worker.bytes_to_fetch": fetched_bytes,
            "compactor_options.poll_interval": f"{poll_ms}ms",
            "compactor_options.worker.compactions_poll_interval": f"{poll_ms}ms",
            "compactor_options.worker.heartbeat_interval": f"{beat_ms}ms",
            "compactor_options.worker_heartbeat_timeout": f"{silence_ms}ms",
            "compactor_options.checkpoint_lifetime": f"{self.replaced_files_kept_ms}ms",
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

    def garbage_options(self, min_age_ms: int | None = None) -> slatedb.GarbageCollectorOptions:
        old = slatedb.GarbageCollectorDirectoryOptions(
            min_age_ms=self.garbage_age_ms if min_age_ms is None else min_age_ms, dry_run=False
        )
        return slatedb.GarbageCollectorOptions(
            manifest_options=old,
            wal_options=old,
            compacted_options=old,
            compactions_options=old,
        )


def _settings_of(values: dict[str, object]) -> slatedb.Settings:
    settings = slatedb.Settings.default()
    for key, value in values.items():
        settings.set(key, json.dumps(value))
    return settings
