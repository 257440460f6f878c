"""What can be wrong with a file of a root, in words for those who have to mend it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

LOOK_DEEP: Final = "`odq doctor --deep` reads and checks every file"
REPAIR: Final = (
    "restore it from a backup; or let `odq repair` open the root without it, and list what is lost"
)

_LOST: Final = {
    "compacted": "the rows that it held",
    "compactions": "nothing: SlateDB begins its work again",
    "manifest": "rows that only it knows the files of",
    "wal": "the commits that it held",
}
_FILE_OF_SLATEDB: Final = re.compile(rf"\S*({'|'.join(_LOST)})/[0-9A-Z]+\.[a-z]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A file that is not as it must be."""

    file: str
    """Its path in the root, with slashes; a folder ends with one."""
    wrong: str
    """What is wrong with it: it goes on after the file's name, as in "… is missing"."""
    lost: str
    """What may be lost."""
    advice: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.file} {self.wrong}; what may be lost: {self.lost}; {self.advice}"


def problem_of(path: str, file: str, wrong: str, lost: str = "") -> Problem:
    """What is wrong with a file of the database ``path``, given by its folder and its name."""
    folder = file.partition("/")[0]
    return Problem(
        file=f"{path}/{file}",
        wrong=wrong,
        lost=lost or _LOST[folder],
        advice=REPAIR,
    )


def with_advice(message: str) -> str:
    """What SlateDB says of damage, and what may be lost, if it names a file, and what to do."""
    found = _FILE_OF_SLATEDB.search(message)
    if found is None:
        return f"{message}; {LOOK_DEEP}"
    return f"{message}; what may be lost: {_LOST[found[1]]}; {REPAIR}"
