"""What a process does for a root: everything, publishing alone, or the queues alone (RFC 0008)."""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
from typing import Final

from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import OdqError, OtherRoleError, OwnedError, StoreUnavailableError
from opendata_queue.root.owner_files import (
    QUEUES_ROLE,
    OwnerFiles,
    RootTime,
    Tenure,
    messages_role,
    owned_shards,
)
from opendata_queue.root.owner_watch import Before, Vacancy, Verdict, judge, wait_until_silent
from opendata_queue.root.ownership import Ownership
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import Objects

logger = logging.getLogger(__name__)

_TRIES: Final = 100
_PUBLISHERS_CHECKED: Final = 64

_turns = itertools.count()


class Role(enum.StrEnum):
    ALL = "all"
    """Publishing, routing and claims."""
    INGEST = "ingest"
    """Publishing, into a live shard of its own."""
    QUEUES = "queues"
    """Routing what others publish, and claims."""


async def take_live_shard(
    objects: Objects,
    clock: Clock,
    *,
    address: str | None,
    name: str | None,
    lease_ms: int,
    root: RootTime | None = None,
) -> tuple[int, Ownership]:
    """Become the writer of a live shard: of one whose writer is gone, or else of a new one."""
    files = ShardFiles(objects)

    async def take(shard: int, before: Before) -> tuple[int, Ownership] | None:
        role = messages_role(shard)
        try:
            ownership = await Ownership.acquire(
                objects,
                (role,),
                clock=clock,
                takeover=Vacancy(epochs={role: before.epoch}, durable={role: before.durable}),
                address=address,
                name=name,
                lease_ms=lease_ms,
                root=root,
            )
        except OwnedError:
            return None  # another process was faster
        return shard, ownership

    for _ in range(_TRIES):
        found = await _vacant_shard(objects, await files.live_shards(), clock)
        if found is None:
            reserved = await files.reserve_live(now_ms=clock.now_ms())
            found = reserved.shard, Before.of(None)
        taken = await take(*found)
        if taken is not None:
            return taken
    raise StoreUnavailableError(f"others were faster {_TRIES} times in taking a live shard")


async def _vacant_shard(
    objects: Objects, shards: list[int], clock: Clock
) -> tuple[int, Before] | None:
    """A shard without a writer, and what to come after; none if all writers are alive."""
    unknown: dict[int, OwnerFiles] = {}
    for shard in shards:
        files = OwnerFiles(objects, messages_role(shard))
        tenure = await files.newest()
        verdict = judge(tenure, clock)
        if verdict is Verdict.GONE:
            return shard, Before.of(tenure)
        if verdict is Verdict.UNKNOWN:
            unknown[shard] = files
    return await _first_silent(unknown, clock)


async def _first_silent(unknown: dict[int, OwnerFiles], clock: Clock) -> tuple[int, Before] | None:
    """Wait for a sign of life of all of them at once; the first that gives none."""
    waiting = {
        asyncio.create_task(wait_until_silent(files, clock)): shard
        for shard, files in unknown.items()
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                shard = waiting.pop(task)
                error = task.exception()
                if error is None:
                    return shard, task.result()
                if not isinstance(error, OwnedError):
                    raise error
        return None
    finally:
        for task in waiting:
            task.cancel()


async def queues_are_elsewhere(objects: Objects) -> OtherRoleError:
    """The error of an ingest process for callers that ask for what the owner of queues does."""
    address = _address_in(await _tenure_of(objects, QUEUES_ROLE))
    where = (
        f"they are served at {address}" if address else "no process serves them at an address now"
    )
    return OtherRoleError(
        f"this process publishes, and does nothing with queues: {where}", address=address
    )


async def publishing_is_elsewhere(objects: Objects, clock: Clock | None = None) -> OtherRoleError:
    """The error of a process that owns queues alone for callers that want to publish."""
    address = await _publisher_address(objects, machine_clock(clock))
    where = f"publish at {address}" if address else "start one with odq serve --role ingest"
    return OtherRoleError(
        f"this process serves queues, and does not publish: {where}", address=address
    )


async def _publisher_address(objects: Objects, clock: Clock) -> str | None:
    """Where to publish: at the first publisher that lives, as far as that is known at once.

    It is always the same one, since a repeated publish must meet the shard that knows its key. If
    none is known to live, those that may live take turns: a client that was refused by one is sent
    to the next. One that is gone is named last, for clients that wait until it is started again.
    """
    doubtful: list[str] = []
    gone: list[str] = []
    for shard in await _shards_to_publish_to(objects):
        tenure = await _tenure_of(objects, messages_role(shard))
        address = _address_in(tenure)
        if tenure is None or address is None:
            continue
        verdict = judge(tenure, clock)
        if verdict is Verdict.GONE:
            gone.append(address)
        elif verdict is Verdict.ALIVE or tenure.is_fresh(clock.now_ms()):
            return address
        else:
            doubtful.append(address)
    if doubtful:
        return doubtful[next(_turns) % len(doubtful)]
    return gone[0] if gone else None


async def _shards_to_publish_to(objects: Objects) -> list[int]:
    """Those that have had an owner: a client may read nothing but ``owners/``."""
    try:
        return (await owned_shards(objects))[:_PUBLISHERS_CHECKED]
    except OdqError as error:
        logger.info("could not list live shards: %s", error)
        return [0]


async def _tenure_of(objects: Objects, role: str) -> Tenure | None:
    try:
        return await OwnerFiles(objects, role).newest()
    except OdqError as error:
        logger.info("could not find out which process serves %s: %s", role, error)
        return None


def _address_in(tenure: Tenure | None) -> str | None:
    """Where a role is served that was not given up."""
    if tenure is None or tenure.released or tenure.owner is None:
        return None
    return tenure.owner.address
