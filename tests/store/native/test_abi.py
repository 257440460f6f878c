"""Python and the C helper mean the same by the same names."""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag

import pytest

from opendata_queue.store.native.abi import MOST_COLUMNS, JobFlag, Result
from opendata_queue.store.native.library import NATIVE_LIBRARY, load_native
from opendata_queue.store.rows.rows import Op

needs_native = pytest.mark.skipif(not NATIVE_LIBRARY.exists(), reason="the C helper was not built")

# By the prefix that their members have in C.
MIRRORED: dict[str, type[IntEnum] | type[IntFlag]] = {"ODQ": Result, "JOB": JobFlag, "OP": Op}


@needs_native
def test_numbers_have_the_same_names_and_values_in_c_and_in_python() -> None:
    numbers = load_native().odq_numbers
    numbers.restype = ctypes.c_char_p
    in_c = dict(line.split("=") for line in numbers().decode().splitlines())

    in_python = {
        f"{prefix}_{member.name}": str(member.value)
        for prefix, members in MIRRORED.items()
        for member in members
    }
    assert in_c == {**in_python, "MOST_COLUMNS": str(MOST_COLUMNS)}
