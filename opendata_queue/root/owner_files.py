"""The files that say who serves a root (RFC 0007): reading them disturbs no owner."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from opendata_queue.model.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.model.paths import OWNERS_FOLDER
from opendata_queue.runtime.process import ProcessIdentity
from opendata_queue.store import Location, Objects, StoreKind, StoreSettings
from opendata_queue.store.objects.control_files import parsed, sealed_model

logger = logging.getLogger(__name__)

QUEUES_ROLE: Final = "queues"
DEFAULT_LEASE_MS: Final = 10_000
MIN_LEASE_MS: Final = 100
MAX_LEASE_MS: Final = 600_000

_MESSAGES_ROLE: Final = re.compile(r"messages-([0-9]{5,10})")
_OWNER: Final = "json"
_ALIVE: Final = "alive.json"
_RELEASED: Final = "released.json"
_NAME: Final = re.compile(r"(\d{20})\.(json|alive\.json|released\.json)")
_TRIES: Final = 10

M = TypeVar("M", bound=BaseModel)


def messages_role(shard: int) -> str:
    """The role of the writer of a live shard."""
    return f"messages-{shard:05}"


ALL_ROLES: Final = (QUEUES_ROLE, messages_role(0))
"""What a process holds that does everything, in the order in which they are taken."""


async def owned_shards(objects: Objects) -> list[int]:
    """The live shards that have or had an owner, in their order: one list."""
    found = map(_MESSAGES_ROLE.fullmatch, await objects.folders(OWNERS_FOLDER))
    return sorted(int(match[1]) for match in found if match is not None)


class RootTime(BaseModel):
    """A moment in the time of a root, and what other clocks showed then (RFC 0012)."""

    model_config = ConfigDict(frozen=True, strict=True)

    at: int
    timeline: str | None
    elapsed_ms: int
    store_at: int | None = None
    """By the store's clock; a file that says none was written at that moment itself."""
    wall_at: int | None = None
    """By the clock of the owner's machine; none where the file's own ``at`` says it."""


class Owner(BaseModel):
    """Who holds a role: ``<epoch>.json``."""

    model_config = ConfigDict(frozen=True, strict=True)

    holder: str
    name: str
    host: str
    machine: str | None
    pid: int
    process_start: str | None
    address: str | None
    lease_ms: Annotated[int, Field(ge=MIN_LEASE_MS, le=MAX_LEASE_MS)]
    taken_at: int
    opening: bool = False
    """It opens databases now, and its first heartbeat that does not say so says that it is done."""
    root: RootTime | None = None
    """What it goes by, if it dies before it has said more."""
    durable: int = 0
    """What owners before it have said, as in a heartbeat."""

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(machine=self.machine, pid=self.pid, start=self.process_start)

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return f"{self.name!r}{where} (host {self.host}, process {self.pid})"


class Heartbeat(BaseModel):
    """That the holder lives: ``<epoch>.alive.json``."""

    model_config = ConfigDict(frozen=True, strict=True)

    holder: str
    count: int
    at: int
    opening: bool = False
    root: RootTime | None = None
    durable: int = 0
    """Commits of the role's database up to this sequence number are durable (RFC 0013)."""


class Release(BaseModel):
    """That the holder has given the role up: ``<epoch>.released.json``."""

    model_config = ConfigDict(frozen=True, strict=True)

    holder: str
    at: int
    root: RootTime | None = None
    durable: int = 0
    """As in a heartbeat; what was said before does not count any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenure:
    """The newest epoch of a role, as it was found. ``owner`` is none if its file is damaged.

    The heartbeat of one that was released is not read.
    """

    epoch: int
    owner: Owner | None
    heartbeat: Heartbeat | None
    released: bool
    durable: int = 0
    """Commits of the role's database up to this sequence number are durable (RFC 0013)."""

    @property
    def lease_ms(self) -> int:
        return DEFAULT_LEASE_MS if self.owner is None else self.owner.lease_ms

    @property
    def count(self) -> int:
        """How many heartbeats there were."""
        return 0 if self.heartbeat is None else self.heartbeat.count

    @property
    def is_opening(self) -> bool:
        """Whether its owner has not come to serve yet, by what it last said."""
        if self.released or self.owner is None or not self.owner.opening:
            return False
        return self.heartbeat is None or self.heartbeat.opening

    @property
    def last_sign_at(self) -> int | None:
        """When its owner last gave a sign of life, by the owner's clock."""
        if self.heartbeat is not None:
            return self.heartbeat.at
        return None if self.owner is None else self.owner.taken_at

    def is_fresh(self, now_ms: int) -> bool:
        """Whether that was within its lease, if the owner's clock shows what ours does."""
        last = self.last_sign_at
        return last is not None and abs(now_ms - last) <= self.lease_ms


class OwnerFiles:
    """The files of one role."""

    __slots__ = ("_folder", "_objects", "role")

    def __init__(self, objects: Objects, role: str) -> None:
        self.role = role
        self._objects = objects
        self._folder = f"{OWNERS_FOLDER}/{role}"

    def __str__(self) -> str:
        return f"{self.role} of {self._objects.location}"

    async def paths(self) -> list[str]:
        """All files of the role."""
        found = await self._found()
        return [self._path(epoch, kind) for epoch in sorted(found) for kind in sorted(found[epoch])]

    async def newest(self) -> Tenure | None:
        """The newest epoch; none if the role was never held."""
        for _ in range(_TRIES):
            found = await self._found()
            epochs = [epoch for epoch, kinds in found.items() if _OWNER in kinds]
            if not epochs:
                return None
            epoch = max(epochs)
            owner = await self._objects.read(self._path(epoch, _OWNER))
            if owner is None:
                continue  # a newer one has removed it since the list
            return await self._tenure(epoch, owner, found[epoch])
        raise StoreUnavailableError(f"{self} changes hands faster than it can be read")

    async def _tenure(self, epoch: int, data: bytes, kinds: set[str]) -> Tenure:
        owner = self._parsed(Owner, data, epoch, _OWNER)
        release = await self._read(Release, epoch, _RELEASED) if _RELEASED in kinds else None
        heartbeat = None
        if release is None and _ALIVE in kinds:
            heartbeat = await self._read(Heartbeat, epoch, _ALIVE)
        said = [one.durable for one in (owner, heartbeat) if one is not None]
        return Tenure(
            epoch=epoch,
            owner=owner,
            heartbeat=heartbeat,
            released=_RELEASED in kinds,
            durable=max(said, default=0) if release is None else release.durable,
        )

    async def root_time(self) -> RootTime | None:
        """The time of the root as the newest owner has said it last; none if it has not."""
        found = await self._found()
        epoch = max((one for one, kinds in found.items() if _OWNER in kinds), default=0)
        # The last that was written comes first.
        for kind in (_RELEASED, _ALIVE):
            file = None
            if kind in found.get(epoch, ()):
                file = await self._objects.read_dated(self._path(epoch, kind))
            root = None if file is None else self._said(epoch, kind, *file)
            if root is not None:
                return root
        data = await self._objects.read(self._path(epoch, _OWNER)) if epoch else None
        owner = self._parsed(Owner, data, epoch, _OWNER)
        return None if owner is None else owner.root

    def owner_path(self, epoch: int) -> str:
        """Where it says who has an epoch."""
        return self._path(epoch, _OWNER)

    def heartbeat_path(self, epoch: int) -> str:
        return self._path(epoch, _ALIVE)

    async def is_newest(self, epoch: int) -> bool:
        """Whether an epoch is there, and none above it."""
        found = await self._found()
        return epoch == max((one for one, kinds in found.items() if _OWNER in kinds), default=0)

    async def is_held(self, epoch: int, holder: str) -> bool:
        """Whether an epoch that was the newest still is, by two reads, which cost less than a list.

        No process skips a number, and of two epochs the older one is removed first. So if there is
        no next one, it has not come yet, or it is gone, and ours was gone before it. A file with
        our number may by now be that of a process that was too slow.
        """
        if await self._objects.read(self._path(epoch + 1, _OWNER)) is not None:
            return False
        data = await self._objects.read(self._path(epoch, _OWNER))
        owner = self._parsed(Owner, data, epoch, _OWNER)
        return data is not None and (owner is None or owner.holder == holder)

    async def create(self, epoch: int, owner: Owner) -> bool:
        """Try to create an epoch; it is won if it is the newest then."""
        return await self._objects.create(self._path(epoch, _OWNER), sealed_model(owner))

    async def beat(self, epoch: int, heartbeat: Heartbeat) -> None:
        # An owner that is alive after a loss of power beats again: it need not be synced.
        await self._objects.write(self._path(epoch, _ALIVE), sealed_model(heartbeat), sync=False)

    async def release(self, epoch: int, release: Release) -> None:
        await self._objects.create(self._path(epoch, _RELEASED), sealed_model(release))

    async def remove_below(self, epoch: int) -> None:
        """Remove what older epochs have left."""
        for older, kinds in sorted((await self._found()).items()):
            if older < epoch:
                for kind in kinds:
                    await self._objects.delete(self._path(older, kind))

    async def _found(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = defaultdict(set)
        for name in await self._objects.names(self._folder):
            if (match := _NAME.fullmatch(name)) is not None:
                found[int(match[1])].add(match[2])
        return found

    def _said(self, epoch: int, kind: str, data: bytes, store_at: int) -> RootTime | None:
        """What a heartbeat or a release says of the time; none if it is damaged."""
        said: Release | Heartbeat | None
        if kind == _RELEASED:
            said = self._parsed(Release, data, epoch, kind)
        else:
            said = self._parsed(Heartbeat, data, epoch, kind)
        if said is None:
            return None
        # Owners of 0.1 went by their machine's clock, and say no more.
        root = said.root or RootTime(at=said.at, timeline=None, elapsed_ms=0)
        if root.store_at is not None:
            return root  # of an owner before it
        return root.model_copy(update={"store_at": store_at, "wall_at": said.at})

    async def _read(self, model: type[M], epoch: int, kind: str) -> M | None:
        data = await self._objects.read(self._path(epoch, kind))
        return self._parsed(model, data, epoch, kind)

    def _parsed(self, model: type[M], data: bytes | None, epoch: int, kind: str) -> M | None:
        return if_whole(model, data, self._objects.location.url_of(self._path(epoch, kind)))

    def _path(self, epoch: int, kind: str) -> str:
        return f"{self._folder}/{epoch:020}.{kind}"


def if_whole(model: type[M], data: bytes | None, name: str) -> M | None:
    """What a file says; none if it is damaged: a root must not be lost for that."""
    if data is None:
        return None
    try:
        return parsed(model, data, name, f"is no {model.__name__.lower()}")
    except CorruptStoreError as error:
        logger.warning("%s", error)
        return None


async def current_owner(objects: Objects, role: str = QUEUES_ROLE) -> Owner | None:
    """Who serves a role, as far as the store knows; none if it is vacant, or always was.

    That process may be gone: only one that tries to take the role over finds that out.
    """
    tenure = await OwnerFiles(objects, role).newest()
    return None if tenure is None or tenure.released else tenure.owner


async def broker_address(objects: Objects, roles: Iterable[str] = (QUEUES_ROLE,)) -> str | None:
    """The URL at which a root is served; none if it is not. Read again if it does not answer."""
    for role in roles:
        owner = await current_owner(objects, role)
        if owner is not None and owner.address is not None:
            return owner.address
    return None


async def find_broker(url: str, *, settings: StoreSettings | None = None) -> str | None:
    """The URL at which the root at ``url`` is served; none if it is not. Nothing is created."""
    location = Location.parse(url)
    if location.kind is StoreKind.FILE and not location.folder.is_dir():
        return None
    return await broker_address(Objects.open(url, settings or StoreSettings()))
