"""Columns become the same rows with the C helper as without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odq_encodings import Column, Each, Fixed, woven
from opendata_queue.store.native import library as native_library
from opendata_queue.store.rows import weave as weaving
from opendata_queue.store.rows.weave import weave


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Column], int]:
    """Columns of some rows, and how many these are."""
    count = draw(st.integers(1, 12))

    def of_width(width: int) -> st.SearchStrategy[Column]:
        size = count * width
        return st.binary(min_size=size, max_size=size).map(lambda data: Fixed(data, width))

    items = st.lists(st.binary(max_size=5), min_size=count, max_size=count)
    column: st.SearchStrategy[Column] = st.one_of(
        st.binary(max_size=6), st.integers(1, 9).flatmap(of_width), items.map(Each.of)
    )
    return draw(st.lists(column, max_size=40)), count


@pytest.fixture(params=["with the helper", "without"])
def helper(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[bool]:
    """Whether there is a C helper."""
    if request.param == "without":
        monkeypatch.setattr(native_library, "NATIVE_LIBRARY", tmp_path / "nothing")
    weaving._native.cache_clear()
    yield request.param != "without"
    weaving._native.cache_clear()


@given(tables())
def test_columns_become_the_same_rows_with_the_helper_as_without(
    table: tuple[list[Column], int],
) -> None:
    columns, count = table
    expected = woven(columns, count)

    assert weave(columns, count, len(expected)) == expected


def test_rows_have_their_bytes_of_every_column_in_turn(helper: bool) -> None:
    columns = [b"<", Fixed(b"0123", 2), b"", Each.of([b"", b"abc"]), b">", Each.of([b"x", b"y"])]

    assert weave(columns, 2, 13) == b"<01>x<23abc>y"
    assert (weaving._native() is not None) == helper


@pytest.mark.parametrize(
    ("columns", "size_bytes"),
    [
        ([b"ab"], 3),
        ([b"ab"], 2**62),
        ([Fixed(b"abc", 2)], 4),
        ([Fixed(b"abcde", 2)], 4),
        ([Fixed(b"ab", 2**62)], 4),
        ([Each([b"a", b"bc"], [2, 3])], 5),
        ([Each([b"a", b"bc"], [1, 1])], 2),
        ([Each([b"a", b"bc"], [1, 2**32 - 1])], 3),
    ],
)
def test_the_helper_writes_nothing_if_columns_are_not_what_they_say(
    columns: list[Column], size_bytes: int
) -> None:
    if weaving._native() is None:
        pytest.skip("there is no helper")
    with pytest.raises((ValueError, MemoryError)):
        weave(columns, 2, size_bytes)
