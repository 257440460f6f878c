"""The C helper as a library: where it is, and whether it is the one that this code knows."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

from opendata_queue.store.native.abi import NATIVE_ABI

_SUFFIX: Final = ".dylib" if sys.platform == "darwin" else ".so"
NATIVE_LIBRARY = Path(__file__).parent / f"_batch_writer{_SUFFIX}"


class Unusable(Exception):
    """Why something cannot be used here."""


def load_native() -> ctypes.CDLL:
    """Load it; `Unusable` if it was not built, or not from these sources."""
    if not NATIVE_LIBRARY.exists():
        raise Unusable(f"{NATIVE_LIBRARY.name} was not built at installation (no C compiler?)")
    try:
        library = ctypes.CDLL(str(NATIVE_LIBRARY))
        layout = library.odq_layout
    except (OSError, AttributeError) as error:
        raise Unusable(f"{NATIVE_LIBRARY.name} cannot be loaded: {error}") from None
    abi = (ctypes.c_uint32 * 1)()
    layout(abi, ctypes.c_uint32(1))
    if abi[0] != NATIVE_ABI:
        raise Unusable(f"{NATIVE_LIBRARY.name} has the version {abi[0]}, not {NATIVE_ABI}: rebuild")
    return library
