"""Writes a batch of rows to SlateDB by the fastest way that is safe with the installed binding.

The stock binding copies every byte in a Python loop and hops through the event loop several times
for each call. There are three tiers, which write the same rows and raise the same errors:

- **compiled**: a C helper (`native/`) gets all rows in one buffer and drives the
  write and the flush itself, in a thread of its own that never needs the GIL.
- **ctypes**: the batch is filled through the binding's C symbols, then written by its public API.
- **public**: the binding's public API alone.

The first two rest on private parts of the binding; `native/binding.py` checks what they assume
before the first write.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import errno
import functools
import logging
import os
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import OdqError
from opendata_queue.store.files.durable import WalSync
from opendata_queue.store.native.abi import CallStatus, JobFlag, Result, RustBuffer, Wal, layout
from opendata_queue.store.native.binding import (
    SYMBOLS,
    address_of,
    checked_binding,
    raise_error,
    symbol_table,
)
from opendata_queue.store.native.jobs import NativeJobs
from opendata_queue.store.native.library import Unusable, load_native
from opendata_queue.store.rows.packed import AnyRows
from opendata_queue.store.rows.rows import HEADER, Op
from opendata_queue.store.workers import in_worker

logger = logging.getLogger(__name__)

TIER_VARIABLE = "ODQ_BATCH_WRITER"
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # no sync says this, only an open does
_TRY_AGAIN_MS = 100


class Tier(enum.StrEnum):
    """The ways to write a batch, fastest first."""

    compiled = "compiled"
    ctypes = "ctypes"
    public = "public"


class BatchWriterUnavailable(OdqError):
    """The tier that was asked for cannot work here: repair the installation, or ask for none."""


async def commit_rows(
    db: slatedb.Db,
    rows: AnyRows,
    *,
    after_flush: Callable[[], None] | None = None,
    on_start: Callable[[], None] | None = None,
    tier: Tier | None = None,
) -> None:
    """Write `rows` as one atomic batch, make them durable, then run `after_flush` in a thread.

    Durable means flushed: the WAL or, if the database has none, the memtable (SlateDB's `flush`
    chooses). With no rows, only the flush and `after_flush` are done, so that a bulk load can end
    with it: everything written before is durable then. A flush with nothing to flush succeeds even
    on a fenced writer; only rows find out.

    `on_start` is called in the event loop once the work has begun elsewhere: what the caller
    computes from then on runs at the same time as the commit. Before that, it would keep the commit
    from starting.

    If the awaiting task is cancelled, the commit goes on to its end all the same; whether it
    succeeded is then unknown to the caller. Commits that run at the same time are not ordered among
    themselves: await one before starting the next if their order matters.
    """
    if not isinstance(after_flush, WalSync):
        await _writer(tier)(db, rows, True, after_flush, on_start)
        return
    first = after_flush.next_number
    try:
        await _writer(tier)(db, rows, True, after_flush, on_start)
    except OSError as error:
        if error.errno not in _OUT_OF_DESCRIPTORS:
            raise
        logger.warning("%s: its newest files are synced as soon as they can be opened", error)
        await _sync_in_the_end(after_flush, first)


async def _sync_in_the_end(sync: WalSync, first: int) -> None:
    """Sync files that could not be opened, once there are descriptors again.

    A sync that has failed must not be repeated, for the system may have dropped what it did not
    write. This one was not begun.
    """
    sync.hold()
    try:
        while True:
            await asyncio.sleep(_TRY_AGAIN_MS / 1000)
            try:
                await in_worker(functools.partial(sync.sync_since, first))
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    raise
            else:
                return
    finally:
        sync.let_go()


async def write_rows(db: slatedb.Db, rows: AnyRows, *, tier: Tier | None = None) -> None:
    """Write `rows` as one atomic batch that is not durable before a later `commit_rows`.

    With no rows, nothing happens. Cancellation and order: as with `commit_rows`.
    """
    if rows:
        await _writer(tier)(db, rows, False, None, None)


def active_tier() -> Tier:
    """The tier that writes when none is asked for."""
    return _default()[0]


# --- choosing a tier ------------------------------------------------------------------------------

_AfterFlush = Callable[[], None] | None
_OnStart = Callable[[], None] | None
_Writer = Callable[[slatedb.Db, AnyRows, bool, _AfterFlush, _OnStart], Coroutine[Any, Any, None]]


def _writer(tier: Tier | None) -> _Writer:
    return _default()[1] if tier is None else _forced(tier)


@functools.cache
def _forced(tier: Tier) -> _Writer:
    try:
        return _BUILDERS[tier]()
    except Unusable as reason:
        raise BatchWriterUnavailable(f"batch writer tier {tier} cannot be used: {reason}") from None


@functools.cache
def _default() -> tuple[Tier, _Writer]:
    name = os.environ.get(TIER_VARIABLE)
    if name:
        return _tier_named(name), _forced(_tier_named(name))
    reasons = []
    for tier, build in _BUILDERS.items():
        try:
            writer = build()
        except Unusable as reason:
            reasons.append(f"{tier} cannot be used: {reason}")
            continue
        if reasons:
            logger.warning("batch writer steps down to tier %s (%s)", tier, "; ".join(reasons))
        return tier, writer
    raise AssertionError("the public tier is always usable")


def _tier_named(name: str) -> Tier:
    try:
        return Tier(name)
    except ValueError:
        known = ", ".join(Tier)
        raise BatchWriterUnavailable(
            f"{TIER_VARIABLE} is {name!r}, which is none of {known}"
        ) from None


# --- tier: compiled -------------------------------------------------------------------------------


@functools.cache
def native_jobs() -> NativeJobs:
    """The C helper's threads; `Unusable` where it can't be used."""
    binding = checked_binding()
    helper = _load_native()
    return NativeJobs(
        helper, symbol_table(binding), binding, functools.partial(raise_error, binding)
    )


def _compiled() -> _Writer:
    jobs = native_jobs()
    write = _blocking_write()

    async def run(
        db: slatedb.Db, rows: AnyRows, flush: bool, after_flush: _AfterFlush, on_start: _OnStart
    ) -> None:
        _check_db(db)
        packed = rows.packed()
        if after_flush is None or isinstance(after_flush, WalSync):
            await jobs.write(db._handle, packed, flush=flush, sync=after_flush, on_start=on_start)
            return

        def work() -> None:
            write(db, packed, flush)
            after_flush()

        await in_worker(work, on_start)

    return run


def _blocking_write() -> Callable[[slatedb.Db, bytes, bool], None]:
    """Writes in the thread that calls it, for callers that run Python right after it."""
    binding = checked_binding()
    symbols = symbol_table(binding)
    odq_write = _load_native().odq_write
    odq_write.restype = ctypes.c_int32
    odq_write.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_int32,
        ctypes.POINTER(Wal),
        ctypes.POINTER(CallStatus),
    )

    def write(db: slatedb.Db, packed: bytes, flush: bool) -> None:
        status = CallStatus()
        flags = JobFlag.FLUSH if flush else 0
        result = odq_write(symbols, db._handle, packed, len(packed), flags, None, status)
        if result == Result.FAILED:
            raise_error(binding, status)
        if result != Result.OK:
            raise AssertionError(f"the compiled batch writer returned {result}")

    return write


def _load_native() -> ctypes.CDLL:
    library = load_native()
    expected = layout(symbols=len(SYMBOLS), header_bytes=HEADER.size)
    found = (ctypes.c_uint32 * len(expected))()
    count = library.odq_layout(found, ctypes.c_uint32(len(expected)))
    if count != len(expected) or [*found] != expected:
        raise Unusable(f"the C helper has the layout {[*found]}, not {expected}: rebuild")
    return library


def _check_db(db: object) -> None:
    # The handle is an address: that of any other object would be taken for a database.
    if not isinstance(db, slatedb.Db):
        raise TypeError(f"db must be a slatedb.Db, not {type(db).__name__}")


# --- tiers on the binding's own futures -----------------------------------------------------------

_Fill = Callable[[AnyRows], slatedb.WriteBatch]
_commits: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly


def _on_public_futures(fill: _Fill) -> _Writer:
    async def run(
        db: slatedb.Db, rows: AnyRows, flush: bool, after_flush: _AfterFlush, on_start: _OnStart
    ) -> None:
        _check_db(db)
        batch = fill(rows) if rows else None
        commit = asyncio.create_task(_commit_batch(db, batch, flush, after_flush))
        _commits.add(commit)
        commit.add_done_callback(_commits.discard)
        if on_start is not None:
            on_start()
        await asyncio.shield(commit)

    return run


async def _commit_batch(
    db: slatedb.Db, batch: slatedb.WriteBatch | None, flush: bool, after_flush: _AfterFlush
) -> None:
    if batch is not None:
        await db.write(batch)
    if flush:
        await db.flush()
    if after_flush is not None:
        await in_worker(after_flush)


_PUT_OPTIONS = struct.Struct(">iQ")  # Ttl variant, milliseconds
_TTL_EXPIRE_AFTER_MILLIS = 3
_pack_length = struct.Struct(">i").pack


def _ctypes() -> _Writer:
    binding = checked_binding()
    library = binding._UniffiLib
    status_type = ctypes.POINTER(CallStatus)

    def bind(symbol: str, result: Any, *arguments: Any) -> Any:
        # Own prototypes: the binding's are shared, and PYFUNCTYPE does not let go of the GIL,
        # which for calls this short costs more than the call.
        prototype = ctypes.PYFUNCTYPE(result, *arguments, status_type)
        return prototype(address_of(library, symbol))

    u64, buffer = ctypes.c_uint64, RustBuffer
    method = "uniffi_slatedb_uniffi_fn_method_writebatch_"
    alloc = bind("ffi_slatedb_uniffi_rustbuffer_alloc", buffer, u64)
    clone = bind("uniffi_slatedb_uniffi_fn_clone_writebatch", u64, u64)
    put = bind(f"{method}put", None, u64, buffer, buffer)
    put_with_options = bind(f"{method}put_with_options", None, u64, buffer, buffer, buffer)
    delete = bind(f"{method}delete", None, u64, buffer)

    def lower(content: bytes, status: CallStatus) -> RustBuffer:
        lowered: RustBuffer = alloc(len(content), status)
        if status.code:
            raise_error(binding, status)
        ctypes.memmove(lowered.data, content, len(content))
        lowered.len = len(content)
        return lowered

    def fill(rows: AnyRows) -> slatedb.WriteBatch:
        batch = slatedb.WriteBatch()
        status = CallStatus()
        for op, key, value, ttl_ms in rows:
            lowered_key = lower(_pack_length(len(key)) + key, status)
            if op == Op.DELETE:
                delete(clone(batch._handle, status), lowered_key, status)
            else:
                lowered_value = lower(_pack_length(len(value)) + value, status)
                if op == Op.PUT:
                    put(clone(batch._handle, status), lowered_key, lowered_value, status)
                else:
                    ttl = lower(_PUT_OPTIONS.pack(_TTL_EXPIRE_AFTER_MILLIS, ttl_ms), status)
                    own = clone(batch._handle, status)
                    put_with_options(own, lowered_key, lowered_value, ttl, status)
            if status.code:
                raise_error(binding, status)
        return batch

    return _on_public_futures(fill)


def _public() -> _Writer:
    return _on_public_futures(_fill_publicly)


def _fill_publicly(rows: AnyRows) -> slatedb.WriteBatch:
    batch = slatedb.WriteBatch()
    for op, key, value, ttl_ms in rows:
        if op == Op.DELETE:
            batch.delete(key)
        elif op == Op.PUT:
            batch.put(key, value)
        else:
            ttl = slatedb.Ttl.EXPIRE_AFTER_MILLIS(ttl_ms)
            batch.put_with_options(key, value, slatedb.PutOptions(ttl=ttl))
    return batch


_BUILDERS: dict[Tier, Callable[[], _Writer]] = {
    Tier.compiled: _compiled,
    Tier.ctypes: _ctypes,
    Tier.public: _public,
}
