"""Writes a batch of rows to SlateDB by the fastest way that is safe with the installed binding.

The stock binding copies every byte in a Python loop and hops through the event loop several times
for each call. There are three tiers, which write the same rows and raise the same errors:

- **compiled**: a C helper (`native/batch_writer.c`) gets all rows in one buffer and drives the
  write and the flush itself, in a thread of its own that never needs the GIL.
- **ctypes**: the batch is filled through the binding's C symbols, then written by its public API.
- **public**: the binding's public API alone.

The first two rest on private parts of the binding, so they are used only with the very version that
they were written for; everything that is assumed is checked before the first write.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import errno
import functools
import importlib
import importlib.metadata
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import OdqError
from opendata_queue.store.files.durable import WalSync
from opendata_queue.store.native.jobs import (
    FAILED,
    OK,
    Append,
    CallStatus,
    NativeJobs,
    Outcome,
    RustBuffer,
    Wal,
    log_unheard,
)
from opendata_queue.store.native.library import NATIVE_ABI, Unusable, load_native
from opendata_queue.store.rows.packed import AnyRows
from opendata_queue.store.rows.rows import HEADER, Op

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

    `on_start` is called in the event loop once the work has begun elsewhere: whoever computes from
    then on does it beside the commit. Before that, it would keep the commit from starting.

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


# --- what is assumed of the binding ---------------------------------------------------------------

SLATEDB_VERSION = "0.17.0"
CONTRACT_VERSION = 30
# uniffi's hash over each function's signature. The binding has these checks too, commented out.
CHECKSUMS = {
    "constructor_writebatch_new": 2056,
    "method_db_flush": 42157,
    "method_db_write": 63711,
    "method_writebatch_delete": 58549,
    "method_writebatch_put": 48246,
    "method_writebatch_put_with_options": 31177,
}
# In the order of `Symbols` in native/batch_writer.c.
SYMBOLS = (
    "ffi_slatedb_uniffi_rustbuffer_alloc",
    "uniffi_slatedb_uniffi_fn_clone_db",
    "uniffi_slatedb_uniffi_fn_constructor_writebatch_new",
    "uniffi_slatedb_uniffi_fn_clone_writebatch",
    "uniffi_slatedb_uniffi_fn_free_writebatch",
    "uniffi_slatedb_uniffi_fn_free_writehandle",
    "uniffi_slatedb_uniffi_fn_method_writebatch_put",
    "uniffi_slatedb_uniffi_fn_method_writebatch_put_with_options",
    "uniffi_slatedb_uniffi_fn_method_writebatch_delete",
    "uniffi_slatedb_uniffi_fn_method_db_write",
    "uniffi_slatedb_uniffi_fn_method_db_flush",
    "ffi_slatedb_uniffi_rust_future_poll_u64",
    "ffi_slatedb_uniffi_rust_future_complete_u64",
    "ffi_slatedb_uniffi_rust_future_free_u64",
    "ffi_slatedb_uniffi_rust_future_poll_void",
    "ffi_slatedb_uniffi_rust_future_complete_void",
    "ffi_slatedb_uniffi_rust_future_free_void",
    "ffi_slatedb_uniffi_rustbuffer_free",
    "uniffi_slatedb_uniffi_fn_free_db",
    "uniffi_slatedb_uniffi_fn_method_db_scan_with_options",
    "uniffi_slatedb_uniffi_fn_clone_dbreader",
    "uniffi_slatedb_uniffi_fn_free_dbreader",
    "uniffi_slatedb_uniffi_fn_method_dbreader_scan_with_options",
    "uniffi_slatedb_uniffi_fn_clone_dbiterator",
    "uniffi_slatedb_uniffi_fn_free_dbiterator",
    "uniffi_slatedb_uniffi_fn_method_dbiterator_next_batch",
    "ffi_slatedb_uniffi_rust_future_poll_rust_buffer",
    "ffi_slatedb_uniffi_rust_future_complete_rust_buffer",
    "ffi_slatedb_uniffi_rust_future_free_rust_buffer",
    "ffi_slatedb_uniffi_rust_future_cancel_u64",
    "ffi_slatedb_uniffi_rust_future_cancel_rust_buffer",
)


def checked_binding() -> Any:
    """The binding's generated module, once it has proved to be the one this file knows."""
    version = importlib.metadata.version("slatedb")
    if version != SLATEDB_VERSION:
        raise Unusable(f"slatedb is {version}, not {SLATEDB_VERSION}")
    try:
        binding = importlib.import_module("slatedb.uniffi._slatedb_uniffi.slatedb")
        _check_symbols(binding._UniffiLib)
        _check_layout(RustBuffer, binding._UniffiRustBuffer)
        _check_layout(CallStatus, binding._UniffiRustCallStatus)
        _ = binding._uniffi_check_call_status, binding._UniffiFfiConverterTypeError
    except (ImportError, AttributeError) as error:
        raise Unusable(f"the slatedb binding lacks something: {error}") from None
    return binding


def _check_symbols(library: Any) -> None:
    contract = library.ffi_slatedb_uniffi_uniffi_contract_version()
    if contract != CONTRACT_VERSION:
        raise Unusable(f"the uniffi contract version is {contract}, not {CONTRACT_VERSION}")
    check_checksums(library, CHECKSUMS)
    for name in SYMBOLS:
        getattr(library, name)


def check_checksums(library: Any, checksums: Mapping[str, int]) -> None:
    """Compare the binding's functions with those that were known when the code was written."""
    for name, expected in checksums.items():
        found = getattr(library, f"uniffi_slatedb_uniffi_checksum_{name}")()
        if found != expected:
            raise Unusable(f"the API checksum of {name} is {found}, not {expected}")


def _check_layout(ours: type[ctypes.Structure], theirs: type[ctypes.Structure]) -> None:
    if _layout(ours) != _layout(theirs):
        raise Unusable(f"{theirs.__name__} has the layout {_layout(theirs)}, not {_layout(ours)}")


def _layout(structure: type[ctypes.Structure]) -> list[tuple[str, int, int]]:
    fields = [(field[0], getattr(structure, field[0])) for field in structure._fields_]
    return [(name, field.offset, field.size) for name, field in fields]


def _address(library: Any, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _raise_error(binding: Any, status: ctypes.Structure) -> None:
    """Raise what the binding would have raised for `status`; this frees the error's buffer."""
    own = binding._UniffiRustCallStatus.from_buffer(status)
    binding._uniffi_check_call_status(binding._UniffiFfiConverterTypeError, own)


# --- threads --------------------------------------------------------------------------------------


class _Workers:
    """Threads for blocking calls, started when all others are busy.

    Not asyncio's executor: it is shut down with its loop, is shared with whatever else blocks, and
    costs a second future for each call. The threads are daemons, so a store that does not answer
    cannot keep the process from ending; a commit cut off like that was acknowledged to nobody.
    """

    MAX_THREADS = 64

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._threads < self.MAX_THREADS:
                self._threads += 1
                threading.Thread(target=self._run, name="odq-commit", daemon=True).start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


_workers = _Workers()


async def in_worker(work: Callable[[], None], on_start: _OnStart = None) -> None:
    """Run `work` in a thread to its end, even if the awaiting task is cancelled.

    `on_start` is called in the loop when the thread is about to leave Python alone.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[BaseException | None] = loop.create_future()

    def job() -> None:
        error: BaseException | None = None
        try:
            if on_start is not None:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(on_start)
            work()
        except BaseException as raised:
            error = raised
        _deliver(loop, done, error)

    _workers.submit(job)
    # As a result, not as the future's exception, which must not be a StopIteration.
    error = await done
    if error is not None:
        raise error


def _deliver(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[BaseException | None],
    error: BaseException | None,
) -> None:
    def settle() -> None:
        if not done.done():
            done.set_result(error)
        elif error is not None:
            log_unheard(error)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop was closed, and with it whoever waited
        if error is not None:
            log_unheard(error)


# --- tier: compiled -------------------------------------------------------------------------------


@functools.cache
def native_jobs() -> NativeJobs:
    """The C helper's threads; `Unusable` where it can't be used."""
    binding = checked_binding()
    helper = _load_native()
    return NativeJobs(helper, _symbols(binding), binding, functools.partial(_raise_error, binding))


def _symbols(binding: Any) -> Any:
    addresses = [_address(binding._UniffiLib, name) for name in SYMBOLS]
    return (ctypes.c_void_p * len(SYMBOLS))(*addresses)


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
    """Writes in the thread that calls it, for whoever has Python to run right after it."""
    binding = checked_binding()
    symbols = _symbols(binding)
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
        result = odq_write(symbols, db._handle, packed, len(packed), flush, None, status)
        if result == FAILED:
            _raise_error(binding, status)
        if result != OK:
            raise AssertionError(f"the compiled batch writer returned {result}")

    return write


def _load_native() -> ctypes.CDLL:
    library = load_native()
    expected = _native_layout()
    found = (ctypes.c_uint32 * len(expected))()
    count = library.odq_layout(found, ctypes.c_uint32(len(expected)))
    if count != len(expected) or [*found] != expected:
        raise Unusable(f"the C helper has the layout {[*found]}, not {expected}: rebuild")
    return library


def _native_layout() -> list[int]:
    """What `odq_layout` must answer."""
    return [
        NATIVE_ABI,
        ctypes.sizeof(RustBuffer),
        RustBuffer.len.offset,
        RustBuffer.data.offset,
        ctypes.sizeof(CallStatus),
        CallStatus.error_buf.offset,
        len(SYMBOLS) * ctypes.sizeof(ctypes.c_void_p),
        HEADER.size,
        ctypes.sizeof(Wal),
        Wal.descriptor.offset,
        Wal.error_number.offset,
        Wal.next.offset,
        ctypes.sizeof(Outcome),
        Outcome.result.offset,
        Outcome.status.offset,
        Outcome.rows.offset,
        ctypes.sizeof(Append),
        Append.descriptor.offset,
        Append.then_sync.offset,
        Append.offset.offset,
    ]


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
        return prototype(_address(library, symbol))

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
            _raise_error(binding, status)
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
                _raise_error(binding, status)
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
