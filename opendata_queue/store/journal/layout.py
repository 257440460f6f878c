"""Where journals are, and how large: their folder, their numbered names, their two regions."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from opendata_queue.store.location import JOURNAL_SUFFIX

FOLDER: Final = "journal"
REGION_BYTES: Final = 8 * 1024 * 1024
MAX_RECORD_BYTES: Final = 1024 * 1024
"""Larger commits are worth a file of SlateDB's own."""

_NAME: Final = re.compile(rf"(\d{{20}}){re.escape(JOURNAL_SUFFIX)}")


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:020}{JOURNAL_SUFFIX}"


def numbers_in(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]
