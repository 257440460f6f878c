"""What ``odq init`` and ``odq doctor`` say of a store: what it can do, and what follows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from opendata_queue.cli.common import duration_text
from opendata_queue.cli.doctor.findings import Finding, fail, ok, warn
from opendata_queue.model.clock import Clock
from opendata_queue.store import Abilities, Objects, Overwrite, StoreKind, Upkeep

_MUCH_GARBAGE: Final = 100
_OLD_MS: Final = 30 * 60_000
_LISTED: Final = 1_000


def describe(abilities: Abilities, kind: StoreKind) -> list[Finding]:
    """One finding for each thing that was tried."""
    if not abilities.creates_once:  # nothing else was tried
        return [_creates(abilities)]
    return [_creates(abilities), _reads(abilities), _overwrites(abilities, kind)]


def _creates(abilities: Abilities) -> Finding:
    check = "conditional writes"
    if abilities.creates_once:
        return ok(check, "an object can be created only once, also by several at a time")
    return fail(
        check,
        "an object that is there already is created over again",
        "move the root to a store with conditional writes: here two owners could both win",
    )


def _reads(abilities: Abilities) -> Finding:
    check = "lists and ranges"
    if abilities.lists_at_once and abilities.reads_ranges:
        return ok(check, "a list has what was written before it, and parts can be read")
    return fail(
        check,
        "; ".join(abilities.missing),
        "move the root to a store that reads what was written, as S3 does",
    )


def _overwrites(abilities: Abilities, kind: StoreKind) -> Finding:
    check = "overwrite by ETag"
    if kind is StoreKind.FILE:
        return ok(check, "files have none; garbage is collected by its age")
    if abilities.overwrite is Overwrite.QUOTED:
        return ok(check, "an object is overwritten only if it is the one that was read")
    if abilities.overwrite is Overwrite.BARE:
        return ok(
            check,
            "only with an ETag without quotes, which SlateDB does not send: its boundaries are "
            "moved for it, and garbage is collected as elsewhere",
        )
    return warn(
        check,
        "it does not work: SlateDB's boundaries are moved without it, and manifests are kept for "
        "longer",
        "it is safe unless two processes stand still for minutes at once (rfcs/0015); a store with "
        "If-Match has no such limit",
    )


async def check_garbage(
    objects: Objects, paths: Iterable[str], clock: Clock, *, served: bool
) -> Finding:
    """Whether an owner removes what is not needed any more: WAL objects of before its flush."""
    for path in paths:
        ages = await _garbage_ages(objects, path, clock.now_ms())
        if served and len(ages) >= _MUCH_GARBAGE:
            return warn(
                "garbage",
                f"of {path} {len(ages)} WAL objects or more are not needed any more, the oldest "
                f"was written {duration_text(max(ages))} ago",
                "its owner collects no garbage: see its log, its /readyz and odq_garbage_* of its "
                "/metrics",
            )
    return ok("garbage", "no more than what goes by itself")


async def _garbage_ages(objects: Objects, path: str, now_ms: int) -> list[int]:
    """How old WAL objects are that should be gone, of the first thousand.

    Those without a byte fence earlier owners, and stay.
    """
    first_needed = await Upkeep(objects, path).first_needed_wal_file()
    return [
        now_ms - modified_ms
        for name, size, modified_ms in await objects.list_with_times(f"{path}/wal", _LISTED)
        if size and _number(name) < first_needed and now_ms - modified_ms > _OLD_MS
    ]


def _number(name: str) -> int:
    stem = name.partition(".")[0]
    return int(stem) if stem.isdecimal() else 0
