"""What is assumed of SlateDB's Python binding, and the check that it is so.

The C helper, and all else that goes past the binding's public API, rests on private parts of it. So
these are used only with the very version that they were written for.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from opendata_queue.store.native.abi import CallStatus, RustBuffer
from opendata_queue.store.native.library import Unusable

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
# In the order of `Symbols` in helper.h.
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
        _ = binding.DbIterator._uniffi_make_instance
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


def address_of(library: Any, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def raise_error(binding: Any, status: ctypes.Structure) -> None:
    """Raise what the binding would have raised for `status`; this frees the error's buffer."""
    own = binding._UniffiRustCallStatus.from_buffer(status)
    binding._uniffi_check_call_status(binding._UniffiFfiConverterTypeError, own)


def symbol_table(binding: Any) -> Any:
    """The addresses of all symbols, as the C helper takes them."""
    addresses = [address_of(binding._UniffiLib, name) for name in SYMBOLS]
    return (ctypes.c_void_p * len(SYMBOLS))(*addresses)
