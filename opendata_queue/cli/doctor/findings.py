"""What a check has found, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    level: Level
    check: str
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(level=Level.OK, check=check, found=found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(level=Level.WARN, check=check, found=found, advice=advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(level=Level.FAIL, check=check, found=found, advice=advice)
