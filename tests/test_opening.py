"""What the front door says to URLs that lead nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import opendata_queue as odq

DOORS: list[Callable[..., Any]] = [odq.open, odq.connect]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("url", [None, 5, b"memory:///", Path("/tmp/x")])
def test_what_is_no_text_is_refused(door: Callable[..., Any], url: object) -> None:
    with pytest.raises(odq.StoreAccessError, match="is not a URL"):
        door(url)


def test_what_is_no_text_is_refused_by_readers() -> None:
    with pytest.raises(odq.StoreAccessError, match="5 is not a URL"):
        odq.open(5, read_only=True)  # type: ignore[arg-type]


def test_a_file_is_no_root(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"precious")

    with pytest.raises(odq.StoreAccessError, match="that is a file, not a folder"):
        odq.open(f"file://{file}")

    assert file.read_bytes() == b"precious"


def test_a_name_that_is_too_long_is_no_root(tmp_path: Path) -> None:
    with pytest.raises(odq.StoreAccessError, match="longer than the file system can take"):
        odq.open(f"file://{tmp_path}/{'x' * 300}")
