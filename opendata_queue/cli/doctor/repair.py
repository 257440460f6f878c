"""``odq repair``: have a damaged root open with what is there, and list what is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from opendata_queue.cli.common import (
    AsJson,
    RootStore,
    StoreArgument,
    confirm,
    note,
    objects_at,
    plural,
    print_json,
    root_location,
    run,
    url_of,
)
from opendata_queue.cli.doctor.whole_root import RootCheck, role_of
from opendata_queue.model.clock import Clock, SystemClock
from opendata_queue.model.errors import CorruptStoreError, OdqError, OwnedError, StoreAccessError
from opendata_queue.model.paths import FEATURES_FOLDER, LIVE_SHARDS_FOLDER, OWNERS_FOLDER
from opendata_queue.root.descriptor import DESCRIPTOR_PATH, described, make_root_again
from opendata_queue.root.features import checked_features, create_features
from opendata_queue.root.owner_files import ALL_ROLES, OwnerFiles, messages_role
from opendata_queue.root.owner_watch import Verdict, judge
from opendata_queue.root.ownership import Ownership
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import (
    Objects,
    Problem,
    StoreKind,
    check_database,
    repair_database,
    salvage_ssts,
)
from opendata_queue.store.problems import LOOK_DEEP

_NAME = "odq repair"
_TORN = "torn"
_STOP_IT = "stop it first: a root that is served is not repaired"


@dataclass(kw_only=True, slots=True)
class Repairs:
    """What was found, and what was done about it."""

    problems: list[Problem] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    made_again: list[str] = field(default_factory=list)


def repair(
    url: StoreArgument = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    store: RootStore = None,
    as_json: AsJson = False,
) -> None:
    """Have a damaged root open with what is there, and list what is not.

    Restore the files from a backup if there is one: this is for when there is none. Files that
    can't be used are set aside in a folder `torn`, and nothing is removed. Messages that they held
    are lost. It refuses a root that is served, and no other command does this by itself.

    Examples:
      odq doctor --deep file:///var/lib/queues
      odq repair file:///var/lib/queues
    """
    target = url_of(store, url)
    location = root_location(target)
    if location.kind is StoreKind.FILE and not location.folder.is_dir():
        raise StoreAccessError(f"there is no root at {target}: check the path")
    clock = SystemClock()
    run(_refuse_served(objects_at(target), clock))
    found = run(_all_problems(objects_at(target), clock))
    if not as_json:
        for problem in found:
            typer.echo(str(problem))
    repairs = Repairs()
    if found:
        question = f"{plural(len(found), 'problem')}: set aside what can't be used in {target}?"
        confirm(question, yes)
        repairs = run(_repair(objects_at(target), clock))
    if as_json:
        print_json({"store": target, **asdict(repairs)})
        return
    for path in repairs.set_aside:
        typer.echo(f"set aside: {path}")
    for path in repairs.made_again:
        typer.echo(f"made again: {path}")
    typer.echo(f"open it now; {LOOK_DEEP}" if found else "nothing is damaged")


async def _refuse_served(objects: Objects, clock: Clock) -> None:
    """Refuse early, before all files are read. An owner of unknown state is waited for later."""
    for role in await _roles(objects):
        tenure = await OwnerFiles(objects, role).newest()
        if judge(tenure, clock) is Verdict.ALIVE:
            owner = None if tenure is None else tenure.owner
            raise OwnedError(f"{objects.location} is served by {owner}: {_STOP_IT}")


async def _roles(objects: Objects) -> list[str]:
    live = await ShardFiles(objects).live_shards()
    return list(dict.fromkeys((*ALL_ROLES, *map(messages_role, live))))


async def _all_problems(objects: Objects, clock: Clock) -> list[Problem]:
    """All problems, also those that no repair can undo."""
    check = RootCheck(objects, clock, note)
    found = [*await _descriptor_problems(objects)]
    parts = (
        check.control_files(),
        check.live_databases(deep=True),
        check.bulk_databases(),
        check.blob_references(),
    )
    for part in parts:
        found += await _as_far_as_it_goes(part)
    return found


async def _as_far_as_it_goes(problems: AsyncIterator[Problem]) -> list[Problem]:
    """Problems up to where a damaged file, which is among them, ends the check."""
    found = []
    try:
        async for problem in problems:
            found.append(problem)
    except OdqError as error:
        note(str(error))
    return found


async def _descriptor_problems(objects: Objects) -> list[Problem]:
    await checked_features(objects)
    content = await objects.read(DESCRIPTOR_PATH)
    wrong = "is missing"
    if content is not None:
        try:
            described(content, DESCRIPTOR_PATH)
        except CorruptStoreError as error:
            wrong = str(error).removeprefix(f"{DESCRIPTOR_PATH} ")
        else:
            return []
    elif not await objects.folders(""):
        raise StoreAccessError(f"there is no root at {objects.location}")
    lost = "the secret of the root: receipts that were handed out are void"
    advice = "restore it from a backup; or let `odq repair` make a new one"
    return [Problem(file=DESCRIPTOR_PATH, wrong=wrong, lost=lost, advice=advice)]


async def _repair(objects: Objects, clock: Clock) -> Repairs:
    """Own all of the root meanwhile, so that no other process opens it."""
    try:
        ownership = await Ownership.acquire(objects, await _roles(objects), clock=clock, name=_NAME)
    except OwnedError as error:
        error.add_note(_STOP_IT)
        raise
    try:
        return await _Repair(objects, clock, ownership).run()
    finally:
        await ownership.release()


class _Repair:
    def __init__(self, objects: Objects, clock: Clock, ownership: Ownership) -> None:
        self._objects = objects
        self._clock = clock
        self._ownership = ownership
        self._files = ShardFiles(objects)
        self._done = Repairs()

    async def run(self) -> Repairs:
        done, check = self._done, RootCheck(self._objects, self._clock, note)
        done.problems += await _descriptor_problems(self._objects)
        if done.problems:
            await self._set_aside(DESCRIPTOR_PATH)
            await make_root_again(self._objects, self._clock)
            done.made_again.append(DESCRIPTOR_PATH)
        for problem in await _as_far_as_it_goes(check.control_files()):
            done.problems.append(problem)
            await self._repair_control_file(problem.file)
        for path in await check.live_paths():
            await self._repair_live(path)
        for problem in await _as_far_as_it_goes(check.bulk_databases()):
            done.problems.append(problem)
            await self._repair_bulk(problem.file)
        done.problems += await _as_far_as_it_goes(check.blob_references())
        return done

    async def _repair_control_file(self, path: str) -> None:
        folder, _, name = path.partition("/")
        if folder == OWNERS_FOLDER:
            return  # those of a new owner, which we are, have taken their place
        await self._set_aside(path)
        stem = name.rpartition("/")[2].removesuffix(".json")
        if folder == FEATURES_FOLDER:
            await create_features(self._objects, [stem])
        elif folder == LIVE_SHARDS_FOLDER:
            await self._files.restore(int(stem), now_ms=self._clock.now_ms())
        else:
            return  # its job can't be known any more
        self._done.made_again.append(path)

    async def _repair_live(self, path: str) -> None:
        """Mend a database; what owners have said of its end is forgotten if that is missing."""
        role = role_of(path)
        acknowledged = self._ownership.acknowledged(role)
        problems = await self._repair_database(path, acknowledged=acknowledged)
        if problems and await self._lacks_its_end(path, acknowledged):
            self._ownership.forget_durable(role)

    async def _lacks_its_end(self, path: str, acknowledged: int) -> bool:
        """Whether the end is missing, and all else is whole by now.

        If something could not be mended, the end is checked after that was restored.
        """
        if await check_database(self._objects, path, deep=False):
            return False
        found = await check_database(self._objects, path, deep=False, acknowledged=acknowledged)
        return bool(found)

    async def _repair_database(self, path: str, *, acknowledged: int = 0) -> list[Problem]:
        problems = await repair_database(self._objects, path, acknowledged=acknowledged)
        self._done.problems += problems
        ssts = [one.file.rpartition("/")[2] for one in problems if "/compacted/" in one.file]
        self._done.made_again += await salvage_ssts(self._objects, path, ssts)
        aside = set(await self._objects.names(f"{path}/{_TORN}"))
        for problem in problems:
            name = problem.file.rpartition("/")[2]
            if name in aside:
                self._done.set_aside.append(f"{problem.file} → {path}/{_TORN}/{name}")
        return problems

    async def _repair_bulk(self, file: str) -> None:
        """What proves its manifest is set aside with it, so that an older one can be read."""
        path = "/".join(file.split("/")[:2])
        await self._set_aside(f"{path}/complete.json")
        if "/manifest/" in file:
            await self._set_aside(file)
        await self._repair_database(path)

    async def _set_aside(self, path: str) -> None:
        content = await self._objects.read(path)
        if content is None:
            return
        await self._objects.write(f"{_TORN}/{path}", content)
        await self._objects.delete(path)
        self._done.set_aside.append(f"{path} → {_TORN}/{path}")
