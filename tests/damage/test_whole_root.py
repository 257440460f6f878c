"""A root with everything in it, whose owner was killed, and one damaged file: all that was
acknowledged is there, or an error, a dead letter or a line of the log names that file."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import opendata_queue as odq
from opendata_queue import Engine, OdqError
from opendata_queue.cli.doctor.findings import Finding, Level, fail
from opendata_queue.cli.doctor.root import check_root
from opendata_queue.model.clock import SystemClock
from tests.damage import whole_root
from tests.damage.whole_root import LARGE, OPTIONS, SETTINGS, expected

EXPLORES = os.environ.get("ODQ_EXAMPLES") == "explore"
MANY = 3_000
DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "deleted": lambda data, chance: None,
    "emptied": lambda data, chance: b"",
    "cut": lambda data, chance: data[: chance.randrange(len(data))] if data else b"",
    "zeroed": lambda data, chance: bytes(len(data)),
    "appended": lambda data, chance: data + chance.randbytes(9),
    "flipped": lambda data, chance: _flipped(data, chance),
}
KINDS = {
    "descriptor": r"system\.json",
    "feature": r"features/.*",
    "owner": r"owners/[a-z]+[^/]*/\d{20}\.json",
    "heartbeat": r"owners/.*\.alive\.json",
    "reservation": r"shards/\d+\.json",
    "bulk reservation": r"shards/bulk/.*",
    "commit": r"commits/.*",
    "blob": r"blobs/.*",
    "proof": r"messages/\d{6,}/complete\.json",
    "bulk manifest": r"messages/\d{6,}/manifest/.*",
    "bulk SST": r"messages/\d{6,}/compacted/.*",
    "manifest": r"(queues/00000|messages/0000\d)/manifest/.*",
    "SST": r"(queues/00000|messages/0000\d)/compacted/.*",
    "WAL": r"(queues/00000|messages/0000\d)/wal/.*",
    "journal": r"(queues/00000|messages/0000\d)/journal/.*",
}


def _flipped(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "root"
    whole_root.make(root)
    return root


def files_of(root: Path, kind: str) -> list[str]:
    paths = (str(one.relative_to(root)) for one in sorted(root.rglob("*")) if one.is_file())
    return [path for path in paths if re.fullmatch(KINDS[kind], path)]


def trials() -> list[tuple[str, str, int]]:
    """Half of all pairs of a kind and a damage, each with its own chance; or very many."""
    pairs = [
        (kind, how)
        for k, kind in enumerate(KINDS)
        for d, how in enumerate(DAMAGES)
        if EXPLORES or (k + d) % 2 == 0
    ]
    count = MANY if EXPLORES else len(pairs)
    return [(*pairs[seed % len(pairs)], seed) for seed in range(count)]


async def handed_out(root: str, *, takeover: bool = False) -> tuple[set[bytes], str]:
    """All that consumers get, and what they and the administrator are told of the rest."""
    system = await Engine.open(root, settings=SETTINGS, options=OPTIONS, takeover=takeover)
    try:
        await system.update_queue("q", max_attempts=1)
        await system.all_is_routed()
        await system._following.bulk.look()
        await system._following.bulk.tried()
        got: list[bytes] = []
        while claimed := await system.claim("q", 100):
            got += [one.payload or b"" for one in claimed]
            await system.ack("q", *claimed)
        failed = await system.failed("q", limit=1_000)
        assert len(got) == len(set(got)), "handed out twice"
        return set(got), "\n".join(one.error for one in failed)
    finally:
        await system.close()


async def deep_findings(root: str) -> list[Finding]:
    checks = check_root(root, SystemClock(), read_only=True, deep=True)
    try:
        return [one async for one in checks]
    except OdqError as error:  # the command says so, too
        return [fail("reading", str(error), "")]


@pytest.mark.parametrize(("kind", "how", "seed"), trials())
async def test_all_is_there_or_the_file_is_named(
    killed: Path,
    tmp_path: Path,
    kind: str,
    how: str,
    seed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chance = random.Random(seed)
    root = tmp_path / "root"
    shutil.copytree(killed, root)
    path = chance.choice(files_of(root, kind))
    name = Path(path).name
    before = (root / path).read_bytes()
    after = DAMAGES[how](before, chance)
    if after is None:
        (root / path).unlink()
    else:
        (root / path).write_bytes(after)
    caplog.set_level(logging.WARNING)
    looks = EXPLORES or seed % 3 == 0
    deep = "\n".join(map(str, await fails(str(root)))) if looks else name

    told, got = "", set[bytes]()
    try:
        # Of an owner that can't be known nobody knows that it is dead: that costs its lease.
        got, told = await handed_out(f"file://{root}", takeover=kind == "owner")
    except OdqError as error:
        told = str(error)
    told = "\n".join([told, *(record.getMessage() for record in caplog.records)])

    wanted = expected()
    if kind == "journal":
        # The newest record can't be told from one whose write was cut off, and was never answered.
        wanted -= {b"last"}
    if not wanted <= got:
        assert name in told or _is_known_not_to_be_seen(kind, how), (path, shown(wanted - got))
        assert name in deep or kind == "commit", path
    assert got <= expected(), (path, "handed out, though acked or damaged", shown(got - expected()))


def _is_known_not_to_be_seen(kind: str, how: str) -> bool:
    """A commit that was deleted before the owner saw it can't be told from one never made.

    ``odq doctor --deep`` says which jobs have filled shards and no commit.
    """
    return (kind, how) == ("commit", "deleted")


async def fails(root: str) -> list[Finding]:
    found = await deep_findings(f"file://{root}")
    return [one for one in found if one.level is not Level.OK and one.check != "owner"]


def shown(payloads: set[bytes]) -> list[bytes]:
    return sorted(one.replace(LARGE, b"LARGE ") for one in payloads)


async def test_a_root_that_is_whole_has_all_and_nothing_to_complain_of(
    killed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(killed, root)

    assert await fails(str(root)) == []
    assert (await handed_out(f"file://{root}")) == (expected(), "")
    async with await odq.open_async(f"file://{root}", read_only=True) as look:
        assert (await look.stats("q")).available == 0
    assert await fails(str(root)) == []
