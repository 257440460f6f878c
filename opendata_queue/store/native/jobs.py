"""Jobs for the C helper's own threads, which wake an event loop when they are done.

A Python thread would need the GIL before and after each call, and wait for it while the event loop
is busy; the helper's threads never need it. Each event loop has a mailbox: jobs that are done are
put into it, and a byte in a pipe wakes the loop, which then takes all of them at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opendata_queue.store.files.durable import WalSync
from opendata_queue.store.native.abi import (
    Append,
    CallStatus,
    JobFlag,
    Outcome,
    Result,
    RustBuffer,
    Wal,
)
from opendata_queue.store.native.binding import address_of

logger = logging.getLogger(__name__)

_TAKEN_AT_ONCE: Final = 16
_WAKE_BYTES: Final = 64
_IN_TIME: Final = b""
_TOO_LATE: Final = b"fenced"


class NotWritten(OSError):
    """A record was not written, or not whole; it has not been synced."""


def not_written(error_number: int) -> NotWritten:
    return NotWritten(error_number, os.strerror(error_number), "the journal")


class Scanned(NamedTuple):
    """What a scan has found."""

    rows: bytes
    """In the form in which the binding returns them."""
    has_more: bool
    """Whether there may be more behind them."""
    rest: Any
    """An iterator of the binding's that goes on, if a scan of a range has stopped for its bytes."""


class _Waiting(NamedTuple):
    """The future of a job, and the files that the job syncs."""

    future: asyncio.Future[Any]
    sync: WalSync | None


class NativeJobs:
    """Hands jobs to the C helper, for the event loop that is running."""

    def __init__(
        self, helper: ctypes.CDLL, symbols: Any, binding: Any, raise_error: Callable[[Any], None]
    ) -> None:
        self._symbols = symbols
        self._raise_error = raise_error
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
            weakref.WeakKeyDictionary()
        )
        self._helper = helper
        u64, u32, i32, pointer = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p
        status = ctypes.POINTER(CallStatus)
        self.new_mailbox = helper.odq_mailbox_new
        self.new_mailbox.restype = pointer
        self.new_mailbox.argtypes = (pointer, i32)
        self.close_mailbox = helper.odq_mailbox_close
        self.close_mailbox.restype = None
        self.close_mailbox.argtypes = (pointer,)
        # Calls that only take or hand over a job: giving up the GIL would cost more than they do.
        local = ctypes.PyDLL(helper._name)
        self.take = local.odq_mailbox_take
        self.take.restype = u32
        self.take.argtypes = (pointer, ctypes.POINTER(Outcome), u32)
        self._submit_scan = local.odq_submit_scan
        self._submit_scan.restype = i32
        self._submit_scan.argtypes = (
            pointer, u64, u64, i32, ctypes.c_char_p, u64, u64, u32, u64, status
        )  # fmt: skip
        self._submit_next = local.odq_submit_next
        self._submit_next.restype = i32
        self._submit_next.argtypes = (pointer, u64, u64, u32, u64, status)
        self._submit_write = local.odq_submit_write
        self._submit_write.restype = i32
        self._submit_write.argtypes = (
            pointer, u64, u64, ctypes.c_char_p, u64, i32, ctypes.POINTER(Wal), status
        )  # fmt: skip
        self._submit_append = local.odq_submit_append
        self._submit_append.restype = i32
        self._submit_append.argtypes = (
            pointer, u64, ctypes.POINTER(Append), ctypes.c_char_p, u64, ctypes.c_char_p, u64,
            ctypes.POINTER(i32),
        )  # fmt: skip
        self._give_up_scan = local.odq_give_up_scan
        self._give_up_scan.restype = None
        self._give_up_scan.argtypes = (pointer, u64)
        free = ctypes.PYFUNCTYPE(None, RustBuffer, status)
        self._iterator_of = binding.DbIterator._uniffi_make_instance
        self._free = free(address_of(binding._UniffiLib, "ffi_slatedb_uniffi_rustbuffer_free"))

    async def write(
        self,
        db_handle: int,
        packed: bytes,
        *,
        flush: bool,
        sync: WalSync | None,
        on_start: Callable[[], None] | None,
    ) -> None:
        """Write rows, flush, sync; goes on to its end even if the awaiting task is cancelled."""
        mailbox, status = self._mailbox(), CallStatus()
        number, future = mailbox.expect(sync)
        wal = None if sync is None else Wal.of(sync)
        flags = JobFlag.FLUSH if flush else 0
        result = self._submit_write(
            mailbox.address, number, db_handle, packed, len(packed), flags, wal, status
        )
        if result != Result.OK:
            self._refuse(mailbox, number, result, status)
        if sync is not None:
            sync.hold()
        if on_start is not None:
            on_start()
        await future

    async def append(
        self,
        descriptor: int,
        offset: int,
        head: bytes,
        rows: bytes,
        *,
        sync: bool,
        next_path: bytes,
        on_start: Callable[[], None] | None,
    ) -> bool:
        """Write a record of a journal; false if another owner had taken over by then.

        ``NotWritten`` means that it can be tried again, any other error that it must not. It goes
        on to its end even if the awaiting task is cancelled.
        """
        mailbox = self._mailbox()
        number, future = mailbox.expect(None)
        flags = JobFlag.SYNC if sync else 0
        to, error_number = Append(next_path, descriptor, flags, offset), ctypes.c_int32()
        result = self._submit_append(
            mailbox.address, number, to, head, len(head), rows, len(rows), error_number
        )
        if result == Result.NOT_WRITTEN:
            mailbox.forget(number)
            raise not_written(error_number.value)
        if result != Result.OK:
            self._refuse(mailbox, number, result, CallStatus())
        if on_start is not None:
            on_start()
        return bool(await future == _IN_TIME)

    async def scan(
        self,
        handle: int,
        *,
        is_reader: bool,
        span: bytes,
        options: bytes,
        limit: int,
        max_bytes: int,
    ) -> Scanned:
        """The first rows of a range. It stops within a few rows when they have ``max_bytes``.

        ``span`` and ``options`` are a ``KeyRange`` and ``ScanOptions`` as uniffi writes them.
        If the awaiting task is cancelled the scan ends, whether or not the store answers.
        """
        mailbox, status = self._mailbox(), CallStatus()
        number, future = mailbox.expect(None)
        both = span + options
        flags = JobFlag.OF_READER if is_reader else 0
        result = self._submit_scan(
            mailbox.address, number, handle, flags, both, len(span), len(both), limit,
            max_bytes, status,
        )  # fmt: skip
        if result != Result.OK:
            self._refuse(mailbox, number, result, status)
        return await self._scanned(mailbox, number, future)

    async def next_rows(self, iterator_handle: int, limit: int, max_bytes: int) -> Scanned:
        """Further rows of an iterator; ``max_bytes`` as above."""
        mailbox, status = self._mailbox(), CallStatus()
        number, future = mailbox.expect(None)
        result = self._submit_next(
            mailbox.address, number, iterator_handle, limit, max_bytes, status
        )
        if result != Result.OK:
            self._refuse(mailbox, number, result, status)
        return await self._scanned(mailbox, number, future)

    async def _scanned(
        self, mailbox: _Mailbox, number: int, future: asyncio.Future[Scanned]
    ) -> Scanned:
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up_scan(mailbox.address, number)
            raise

    def _mailbox(self) -> _Mailbox:
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            self._forget_closed_loops()
            mailbox = self._mailboxes[loop] = _Mailbox(self, loop)
        return mailbox

    def _forget_closed_loops(self) -> None:
        """Let go of loops that were closed with jobs under way.

        The futures of those jobs hold their loop, and the mailbox holds the futures: it would
        never go by itself.
        """
        for reference in self._mailboxes.keyrefs():
            loop = reference()
            if loop is not None and loop.is_closed():
                self._mailboxes.pop(loop, None)

    def _refuse(self, mailbox: _Mailbox, number: int, result: int, status: CallStatus) -> None:
        mailbox.forget(number)
        if result == Result.FAILED:
            self._raise_error(status)
        raise MemoryError(f"the C helper could not take a job ({result})")

    def open(self, reader_end: int, writer_end: int) -> int:
        """The address of a new mailbox that writes to a pipe."""
        address: int | None = self.new_mailbox(self._symbols, writer_end)
        if address is None:
            os.close(reader_end)
            os.close(writer_end)
            raise MemoryError("the C helper could not make a mailbox")
        return address

    def result_of(self, outcome: Outcome, sync: WalSync | None) -> bytes | Scanned:
        """What a job has returned; raises the error that has stopped it. Frees its buffers."""
        if sync is not None:
            sync.next_number = outcome.wal_next
            sync.let_go()
        if outcome.result in (Result.OK, Result.GIVEN_UP):  # what was given up has no caller
            return self._found(outcome) if outcome.rows.data else _IN_TIME
        if outcome.result == Result.FENCED:
            return _TOO_LATE
        if outcome.result == Result.NOT_WRITTEN:
            raise not_written(outcome.error_number)
        if outcome.result == Result.FAILED:
            self._raise_error(outcome.status)
        if outcome.result == Result.NOT_SYNCED:
            where = "the journal" if sync is None else sync.folder
            raise OSError(outcome.error_number, os.strerror(outcome.error_number), where)
        if sync is not None and outcome.result == Result.NO_WAL:
            raise sync.no_file()
        raise AssertionError(f"the compiled batch writer returned {outcome.result}")

    def _found(self, outcome: Outcome) -> Scanned:
        # At once an object, which frees it even if the caller has gone.
        rest = self._iterator_of(outcome.iterator) if outcome.iterator else None
        buffer = outcome.rows
        try:
            rows = ctypes.string_at(buffer.data, buffer.len)
        finally:
            self._free(buffer, CallStatus())
        return Scanned(rows, outcome.has_more != 0, rest)


class _Mailbox:
    """Where the jobs of one event loop come back."""

    def __init__(self, jobs: NativeJobs, loop: asyncio.AbstractEventLoop) -> None:
        self._jobs = jobs
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count()
        self._taken = (Outcome * _TAKEN_AT_ONCE)()
        reader_end, writer_end = os.pipe()
        os.set_blocking(reader_end, False)
        os.set_blocking(writer_end, False)
        self.address = jobs.open(reader_end, writer_end)
        # The mailbox goes with its loop; the results of jobs that are under way are dropped then.
        # The callback must not hold the mailbox: the loop holds the callback until it is closed.
        closing = weakref.finalize(self, _close, jobs, self.address, reader_end)
        closing.atexit = False  # systems are still closed after that
        loop.add_reader(reader_end, _collect, weakref.ref(self), reader_end)

    def expect(self, sync: WalSync | None) -> tuple[int, asyncio.Future[Any]]:
        """A number for a job, and what will be its result."""
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Waiting(future, sync)
        return number, future

    def forget(self, number: int) -> None:
        del self._waiting[number]

    def collect(self) -> None:
        """Hand the results of jobs that are done to their callers."""
        while count := self._jobs.take(self.address, self._taken, _TAKEN_AT_ONCE):
            for outcome in self._taken[:count]:
                future, sync = self._waiting.pop(outcome.number)
                try:
                    result = self._jobs.result_of(outcome, sync)
                except BaseException as error:
                    if future.done():
                        log_unheard(error)
                    else:
                        future.set_exception(error)
                else:
                    if not future.done():
                        future.set_result(result)
            if count < _TAKEN_AT_ONCE:
                return


def _collect(mailbox: weakref.ref[_Mailbox], reader_end: int) -> None:
    try:
        os.read(reader_end, _WAKE_BYTES)
    except BlockingIOError:
        return
    found = mailbox()
    if found is not None:
        found.collect()


def _close(jobs: NativeJobs, address: int, reader_end: int) -> None:
    jobs.close_mailbox(address)
    os.close(reader_end)


def log_unheard(error: BaseException) -> None:
    logger.error("a commit failed after its caller had gone: %r", error)
