"""Where SlateDB counts what it does, without the price of registering each counter in Python.

SlateDB asks the recorder that it is given for 124 counters whenever a database is opened. Its own
recorder is written in Rust, but the binding hands it over as if it were one of ours: every request
comes to Python, is unpacked, packed again and sent back to Rust. That was 45 of the 55 ms that it
took to open a system. Here the request goes to Rust as it came, unopened. Where the binding is not
the one that this was written for, its own way is taken.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Final

import slatedb.uniffi as slatedb

from opendata_queue.store.native.binding import check_checksums, checked_binding
from opendata_queue.store.native.library import Unusable

logger = logging.getLogger(__name__)

_OURS: Final = "method_defaultmetricsrecorder_"
# uniffi's hashes over signatures: of the methods of any recorder, and of SlateDB's own.
CHECKSUMS: Final = {
    "method_metricsrecorder_register_counter": 39547,
    "method_metricsrecorder_register_gauge": 50645,
    "method_metricsrecorder_register_up_down_counter": 5890,
    "method_metricsrecorder_register_histogram": 20670,
    f"{_OURS}register_counter": 33496,
    f"{_OURS}register_gauge": 11200,
    f"{_OURS}register_up_down_counter": 23894,
    f"{_OURS}register_histogram": 43433,
}
METHODS: Final = (
    "register_counter",
    "register_gauge",
    "register_up_down_counter",
    "register_histogram",
)


def new_recorder() -> slatedb.DefaultMetricsRecorder:
    """A recorder for one database, which counts in Rust."""
    _outlive_python()
    _take_short_cut()
    return slatedb.DefaultMetricsRecorder()


@functools.cache
def _take_short_cut() -> bool:
    """Change where the binding sends SlateDB's requests, once in a process."""
    try:
        short_cuts = _short_cuts()
    except Unusable as reason:
        logger.warning("databases are opened in the binding's slow way (%s)", reason)
        return False
    table = table_of(checked_binding())
    for method, short_cut in short_cuts.items():
        setattr(table, method, short_cut)  # it keeps the object alive, too
    return True


@functools.cache
def _outlive_python() -> None:
    """Have Rust find something at the address of the table even when the interpreter is gone.

    A thread of SlateDB's lets go of the recorder some time after its database was closed, or when
    it finds that another process has taken over: maybe while the interpreter ends, or later, as
    long as the process is there. It then reads the table for what to call. The interpreter would
    free the table with all that it has, and the process would crash. So it is never freed, and by
    then says what needs no interpreter.
    """
    try:
        table = table_of(importlib.import_module("slatedb.uniffi._slatedb_uniffi.slatedb"))
        free = type(table.uniffi_free)
    except (ImportError, AttributeError) as error:
        logger.warning("a process that closes no database may crash at its end: %s", error)
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
    does_nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, free)
    atexit.register(setattr, table, "uniffi_free", does_nothing)


def _short_cuts() -> dict[str, Any]:
    binding = checked_binding()
    check_checksums(binding._UniffiLib, CHECKSUMS)
    try:
        return {method: _short_cut(binding, method) for method in METHODS}
    except AttributeError as error:
        raise Unusable(f"the slatedb binding lacks something: {error}") from None


def table_of(binding: Any) -> Any:
    """The functions that Rust calls for a recorder in Python; it has the table's address."""
    return binding._UniffiTraitImplMetricsRecorderImpl._uniffi_vtable


def _short_cut(binding: Any, method: str) -> Any:
    slow = getattr(binding._UniffiTraitImplMetricsRecorderImpl, method)
    native = getattr(binding._UniffiLib, f"uniffi_slatedb_uniffi_fn_{_OURS}{method}")
    recorder_of: Callable[[int], Any] = (
        binding._UniffiFfiConverterTypeMetricsRecorder._handle_map._map.get
    )
    guarded = binding._uniffi_trait_interface_call

    def register(handle: int, *rest: Any) -> None:
        recorder = recorder_of(handle)
        if type(recorder) is not binding.DefaultMetricsRecorder:
            slow(handle, *rest)  # not one of ours
            return
        *arguments, result, status = rest
        guarded(
            status.contents,
            lambda: native(recorder._uniffi_clone_handle(), *arguments, status),
            lambda counter: result.__setitem__(0, counter),
        )

    return type(slow)(register)
