"""Whatever is done to one file of a database whose owner was killed: nothing is passed over.

The database opens with every acknowledged row, or the error names the file. This is so at the first
open and at the next one, and there is never talk of another owner.
"""

from __future__ import annotations

import asyncio
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.store.damage.damage_trials import DAMAGES, KINDS, Kind, copied, files_of, made, outcome

FOLDERS = ("wal", "journal", "manifest", "compactions", "compacted")
BY_NAME = {kind.name: kind for kind in KINDS}
AT_ONCE = 4
EXPLORED = 3_000 if os.environ.get("ODQ_EXAMPLES") == "explore" else 0


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A database of each kind, made by processes that were killed."""
    folder = tmp_path_factory.mktemp("roots")
    with ThreadPoolExecutor(len(KINDS)) as pool:
        made_ones = pool.map(lambda kind: made(folder / kind.name, kind), KINDS)
        return dict(zip(BY_NAME, made_ones, strict=True))


async def damage_and_open(root: Path, kind: Kind, file: Path, how: str, seed: int, to: Path) -> str:
    """What has come of one trial; ``AssertionError`` says which one it was."""
    await asyncio.to_thread(copied, root, to)
    damaged = to / file.relative_to(root)
    DAMAGES[how](damaged, random.Random(seed))
    try:
        return await outcome(to, kind, damaged)
    except AssertionError as error:
        where = f"{kind.name}: {file.relative_to(root)} was {how} (seed {seed})"
        raise AssertionError(f"{where}: {error}") from error


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("name", BY_NAME)
async def test_damage_to_one_file_is_made_good_or_named(
    roots: dict[str, Path], tmp_path: Path, name: str, folder: str
) -> None:
    root, kind = roots[name], BY_NAME[name]
    files = [path for path in files_of(root) if path.parent.name == folder]
    if not files:
        pytest.skip("there is no such file")
    chance = random.Random(f"{name} {folder}")
    limit = asyncio.Semaphore(AT_ONCE)

    async def trial(how: str) -> str:
        # The newest one is the one that matters most, and is hardest to judge.
        file = chance.choice((files[-1], chance.choice(files)))
        async with limit:
            seed = chance.randrange(1 << 30)
            return await damage_and_open(root, kind, file, how, seed, tmp_path / how)

    results = await asyncio.gather(*(trial(how) for how in DAMAGES))

    assert set(results) <= {"whole", "named"}


@pytest.mark.skipif(not EXPLORED, reason="thousands of trials are for make explore")
@pytest.mark.timeout(7_200)
async def test_thousands_of_damaged_files_are_made_good_or_named(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    chance = random.Random(16)
    limit = asyncio.Semaphore(AT_ONCE)
    wrong = []

    async def trial(number: int) -> None:
        kind = chance.choice(KINDS)
        root = roots[kind.name]
        folder = chance.choice(FOLDERS)
        files = [path for path in files_of(root) if path.parent.name == folder]
        if not files:
            return
        file = chance.choice((files[-1], chance.choice(files)))
        how, seed = chance.choice(list(DAMAGES)), chance.randrange(1 << 30)
        try:
            await damage_and_open(root, kind, file, how, seed, tmp_path / str(number))
        except AssertionError as error:
            wrong.append(str(error))

    async def limited(number: int) -> None:
        async with limit:
            await trial(number)

    await asyncio.gather(*map(limited, range(EXPLORED)))

    assert not wrong
