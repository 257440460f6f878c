"""What can be wrong with a file of a root, in words for those who have to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOOK_DEEP: Final = "`odq doctor --deep` reads and checks every file"
REPAIR: Final = (
    "restore it from a backup; or let `odq repair` open the root without it, and list what is lost"
)


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
