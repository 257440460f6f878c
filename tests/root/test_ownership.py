"""Who may open a root, and who must not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from opendata_queue import (
    Engine,
    FencedError,
    InvalidInputError,
    OwnedError,
    StoreSettings,
    StoreUnavailableError,
    Vacancy,
    find_broker,
)
from opendata_queue.root.descriptor import open_root
from opendata_queue.root.owner_files import (
    ALL_ROLES,
    DEFAULT_LEASE_MS,
    Heartbeat,
    Owner,
    OwnerFiles,
    Release,
    Tenure,
    broker_address,
    current_owner,
)
from opendata_queue.root.owner_watch import stand_by
from opendata_queue.root.ownership import Ownership
from opendata_queue.runtime.process import ProcessIdentity
from opendata_queue.store import Database, Objects
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.support.s3_server import S3Server

T = TypeVar("T")

LEASE_MS = 9_000
BEAT_MS = LEASE_MS // 3
EPOCH_1 = "owners/queues/00000000000000000001"
OURS = ProcessIdentity.of_this_process()


@pytest.fixture
async def objects(root: str) -> Objects:
    """Of a root that was made before: owners without one are the remains of a lost root."""
    objects = Objects.open(root, StoreSettings())
    await open_root(objects, ManualClock())
    return objects


@pytest.fixture
async def in_memory(new_memory_root: NewRoot) -> Objects:
    objects = Objects.open(new_memory_root(), StoreSettings())
    await open_root(objects, ManualClock())
    return objects


@pytest.fixture
async def served(root: str, clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open(root, clock=clock, owner_lease_ms=LEASE_MS) as system:
        yield system


def an_owner(**changes: Any) -> Owner:
    """One of another machine, unless changed."""
    said: dict[str, Any] = {
        "holder": "5f0c6b7e8d3a4c1f9e2b7a6d5c4b3a21",
        "name": "orders-0",
        "host": "far-away",
        "machine": "another",
        "pid": 17,
        "process_start": "48213",
        "address": "http://far-away:8080",
        "lease_ms": LEASE_MS,
        "taken_at": 1_000,
    }
    return Owner(**(said | changes))


async def settle_in(objects: Objects, owner: Owner) -> None:
    """Let somebody hold all roles."""
    for role in ALL_ROLES:
        assert await OwnerFiles(objects, role).create(1, owner)


async def beat(objects: Objects, count: int) -> None:
    for role in ALL_ROLES:
        heartbeat = Heartbeat(holder=an_owner().holder, count=count, at=1_000)
        await OwnerFiles(objects, role).beat(1, heartbeat)


async def while_time_passes(
    clock: ManualClock, work: Coroutine[Any, Any, T], *, wait_by_wait: bool = False
) -> T:
    """Turn the clock whenever something waits for it; to the end of each wait, if that matters."""
    task = asyncio.ensure_future(work)
    while not task.done():
        if waits_ms := clock.waits_ms:
            clock.advance_ms(min(waits_ms) if wait_by_wait else 1_000)
        await asyncio.sleep(0)
    return await task


async def until_it_waits(clock: ManualClock, *tasks: asyncio.Task[Any], waits: int = 1) -> None:
    while len(clock.waits_ms) < waits:
        assert not any(task.done() for task in tasks), "it did not wait"
        await asyncio.sleep(0)


async def beats(clock: ManualClock, system: Engine, count: int = 1) -> None:
    """Let the heartbeat of a system that does nothing else come, and see it done."""
    ownership = system._ownership
    for _ in range(count):
        await until_it_waits(clock)
        wanted = ownership.heartbeats + 1
        clock.advance_ms(BEAT_MS)
        while ownership.heartbeats < wanted or (ownership.is_kept and not clock.waits_ms):
            await asyncio.sleep(0)


# --- opening --------------------------------------------------------------------------------------


async def test_the_files_are_what_the_rfc_says(
    root: str, objects: Objects, clock: ManualClock
) -> None:
    system = await Engine.open(
        root, clock=clock, owner_lease_ms=LEASE_MS, name="orders-0", address="http://here:1"
    )
    owner = json.loads(await objects.read(f"{EPOCH_1}.json") or b"")
    await beats(clock, system, 2)
    alive = json.loads(await objects.read(f"{EPOCH_1}.alive.json") or b"")
    await system.close()
    released = json.loads(await objects.read(f"{EPOCH_1}.released.json") or b"")

    assert [len(one.pop("check")) for one in (owner, alive, released)] == [8, 8, 8]
    holder = owner.pop("holder")
    assert len(bytes.fromhex(holder)) == 16
    assert owner.pop("host")
    assert owner == {
        "name": "orders-0",
        "machine": OURS.machine,
        "pid": os.getpid(),
        "process_start": OURS.start,
        "address": "http://here:1",
        "lease_ms": LEASE_MS,
        "taken_at": clock.now_ms() - 2 * BEAT_MS,
        "opening": True,
    }
    now_ms = clock.now_ms()
    root_time = {"at": now_ms, "timeline": "manual", "elapsed_ms": now_ms}
    # One comes at once, and says the time of the root (RFC 0012).
    assert alive == {"holder": holder, "count": 3, "at": now_ms, "root": root_time}
    assert released == {"holder": holder, "at": now_ms, "root": root_time}


async def test_a_served_root_is_refused_and_its_owner_goes_on(
    root: str, clock: ManualClock, served: Engine
) -> None:
    with pytest.raises(OwnedError, match="takeover=True") as caught:
        await Engine.open(root, clock=clock)

    assert caught.value.pid == os.getpid()
    assert caught.value.host
    assert caught.value.address is None
    await served.publish(b"x")


async def test_the_refusal_says_where_to_connect(new_memory_root: NewRoot) -> None:
    url = new_memory_root()
    async with await Engine.open(url, name="orders-0", address="http://orders-0:8080"):
        with pytest.raises(OwnedError, match="connect to http://orders-0:8080") as caught:
            await Engine.open(url)

    assert (caught.value.name, caught.value.address) == ("orders-0", "http://orders-0:8080")


async def test_of_many_that_open_a_root_at_once_one_wins(root: str) -> None:
    found = await asyncio.gather(*(Engine.open(root) for _ in range(8)), return_exceptions=True)

    (winner,) = [one for one in found if isinstance(one, Engine)]
    assert sum(isinstance(one, OwnedError) for one in found) == 7
    await winner.publish(b"x")
    await winner.close()


async def test_after_a_clean_close_nobody_waits(root: str, clock: ManualClock) -> None:
    for _ in range(3):
        async with await Engine.open(root, clock=clock) as system:
            await system.publish(b"x")


def test_a_system_whose_event_loop_is_gone_is_not_waited_for(new_memory_root: NewRoot) -> None:
    url = new_memory_root()
    asyncio.run(Engine.open(url))

    asyncio.run(asyncio.wait_for(Engine.open(url), 120))


async def test_an_owner_whose_process_is_gone_is_not_waited_for(
    root: str, objects: Objects, clock: ManualClock
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    await settle_in(objects, an_owner(machine=OURS.machine, pid=ended.pid))

    await (await Engine.open(root, clock=clock)).close()


async def test_a_zombie_is_no_owner(root: str, objects: Objects, clock: ManualClock) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    start = process_start(zombie.pid)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # ended, and not collected
    await settle_in(objects, an_owner(machine=OURS.machine, pid=zombie.pid, process_start=start))

    await (await Engine.open(root, clock=clock)).close()
    zombie.stdout.close()
    zombie.wait()


async def test_another_process_with_the_id_of_the_owner_is_no_owner(
    root: str, objects: Objects, clock: ManualClock
) -> None:
    await settle_in(objects, an_owner(machine=OURS.machine, pid=os.getppid(), process_start="1"))

    await (await Engine.open(root, clock=clock)).close()


async def test_a_process_of_this_machine_with_a_fresh_heartbeat_is_refused_at_once(
    root: str, objects: Objects, clock: ManualClock
) -> None:
    parent = os.getppid()
    await settle_in(
        objects,
        an_owner(
            machine=OURS.machine,
            pid=parent,
            process_start=process_start(parent),
            taken_at=clock.now_ms() - LEASE_MS,
        ),
    )

    with pytest.raises(OwnedError, match="far-away"):
        await Engine.open(root, clock=clock)


def process_start(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


async def test_an_owner_elsewhere_that_is_silent_for_its_lease_is_replaced(
    root: str, objects: Objects, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await settle_in(objects, an_owner())
    await beat(objects, 5)
    began_at = clock.now_ms()

    system = await while_time_passes(clock, Engine.open(root, clock=clock))

    assert clock.now_ms() - began_at >= LEASE_MS
    assert "'orders-0' at http://far-away:8080" in caplog.text
    assert f"waiting {LEASE_MS} ms" in caplog.text
    await system.publish(b"x")
    await system.close()


async def test_a_silent_owner_of_several_roles_is_waited_for_once(
    in_memory: Objects, clock: ManualClock
) -> None:
    await settle_in(in_memory, an_owner())
    began_at = clock.now_ms()
    opening = asyncio.create_task(Ownership.acquire(in_memory, clock=clock))

    while not opening.done():
        if len(clock.waits_ms) == len(ALL_ROLES):
            clock.advance_ms(max(clock.waits_ms))
        await asyncio.sleep(0)

    assert clock.now_ms() - began_at == LEASE_MS
    await (await opening).release()


async def test_an_owner_elsewhere_that_gives_a_sign_of_life_is_left_alone(
    root: str, objects: Objects, clock: ManualClock
) -> None:
    await settle_in(objects, an_owner())
    opening = asyncio.create_task(Engine.open(root, clock=clock))
    await until_it_waits(clock, opening)
    await beat(objects, 1)

    with pytest.raises(OwnedError, match="http://far-away:8080"):
        await while_time_passes(clock, asyncio.wait_for(opening, None))

    assert await objects.names("owners/queues") == [
        "00000000000000000001.alive.json",
        "00000000000000000001.json",
    ]


async def test_an_owner_that_gives_up_while_one_waits_is_followed(
    in_memory: Objects, clock: ManualClock
) -> None:
    await settle_in(in_memory, an_owner(lease_ms=600_000))
    opening = asyncio.create_task(Ownership.acquire(in_memory, clock=clock))
    await until_it_waits(clock, opening)
    for role in ALL_ROLES:
        await OwnerFiles(in_memory, role).release(1, Release(holder="x", at=1))
    clock.advance_ms(600_000 // 10)

    taken = await opening

    assert taken.epochs == dict.fromkeys(ALL_ROLES, 2)
    await taken.release()


async def test_an_owner_file_that_is_damaged_does_not_lock_the_root(
    root: str, objects: Objects, clock: ManualClock
) -> None:
    await objects.create(f"{EPOCH_1}.json", b"{")
    await objects.create(f"{EPOCH_1}.alive.json", b"")

    system = await while_time_passes(clock, Engine.open(root, clock=clock))

    assert system._ownership.epochs["queues"] == 2
    await system.close()


async def test_files_of_other_names_are_ignored(root: str, objects: Objects) -> None:
    for name in ("1.json", "00000000000000000009.txt", "note", "x/00000000000000000009.json"):
        await objects.write(f"owners/queues/{name}", b"?")

    async with await Engine.open(root) as system:
        assert system._ownership.epochs["queues"] == 1


async def test_an_open_that_fails_gives_the_roles_back(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    settings = StoreSettings(outage_timeout_ms=3_000)
    s3_environment.fail(path_contains="/manifest/", times=None)

    with pytest.raises(StoreUnavailableError, match="/messages/00000"):
        await Engine.open(url, settings=settings)

    s3_environment.heal()
    objects = Objects.open(url, StoreSettings())
    for role in ALL_ROLES:
        assert "00000000000000000001.released.json" in await objects.names(f"owners/{role}")


async def test_whoever_gets_one_role_and_not_the_other_gives_it_back(
    in_memory: Objects, clock: ManualClock
) -> None:
    taken = await Ownership.acquire(in_memory, ["messages-00000"], clock=clock)

    with pytest.raises(OwnedError, match="messages-00000 of memory"):
        await Engine.open(str(in_memory.location), clock=clock)

    assert await current_owner(in_memory, "queues") is None
    assert await current_owner(in_memory, "messages-00000") == taken.owner
    await taken.release()


@pytest.mark.parametrize(
    "wrong",
    [
        {"owner_lease_ms": 99},
        {"owner_lease_ms": 600_001},
        {"owner_lease_ms": "10"},
        {"name": ""},
        {"address": "x" * 256},
        {"takeover": Vacancy(epochs={})},
    ],
)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(
    in_memory: Objects, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        await Engine.open(str(in_memory.location), **wrong)

    assert await in_memory.names("owners/queues") == []


# --- being taken over -----------------------------------------------------------------------------


async def test_an_owner_that_is_replaced_steps_down_though_it_does_nothing(
    root: str, clock: ManualClock, served: Engine, objects: Objects
) -> None:
    await served.create_queue("q")
    waiting = asyncio.create_task(served.claim("q", wait_ms=3_600_000))
    # Only the files: nobody has fenced its databases yet.
    successor = await Ownership.acquire(objects, clock=ManualClock(), takeover=True)
    await until_it_waits(clock, waiting, waits=2)  # the consumer and the heartbeat

    clock.advance_ms(BEAT_MS)
    while served._ownership.is_kept:
        await asyncio.sleep(0)

    with pytest.raises(FencedError, match="another process has taken over queues of"):
        await served.publish(b"x")
    with pytest.raises(FencedError):
        await served.claim("q")
    with pytest.raises(FencedError):
        await waiting
    assert await current_owner(objects) == successor.owner
    await successor.release()


async def test_an_owner_that_slept_through_two_takeovers_steps_down(
    in_memory: Objects, clock: ManualClock
) -> None:
    first = await Ownership.acquire(in_memory, clock=clock)
    for _ in range(2):
        newest = await Ownership.acquire(in_memory, clock=clock, takeover=True)
    while len(await in_memory.names("owners/queues")) > 1:  # the next number is gone, too
        await asyncio.sleep(0)

    with pytest.raises(FencedError):
        await first.check()

    await newest.check()
    await newest.release()


async def test_an_owner_whose_number_somebody_slow_has_used_again_steps_down(
    in_memory: Objects, clock: ManualClock
) -> None:
    first = await Ownership.acquire(in_memory, clock=clock)
    for _ in range(2):
        newest = await Ownership.acquire(in_memory, clock=clock, takeover=True)
    while len(await in_memory.names("owners/queues")) > 1:
        await asyncio.sleep(0)
    assert await OwnerFiles(in_memory, "queues").create(1, an_owner())

    with pytest.raises(FencedError):
        await first.check()

    await newest.release()


async def test_an_owner_whose_file_was_damaged_goes_on(
    in_memory: Objects, clock: ManualClock
) -> None:
    holder = await Ownership.acquire(in_memory, clock=clock)
    await in_memory.write(f"{EPOCH_1}.json", b"\x00")

    await holder.check()

    await holder.release()


async def test_what_was_replaced_and_closes_does_not_release_its_successor(
    root: str, clock: ManualClock, objects: Objects
) -> None:
    first = await Engine.open(root, clock=clock)
    second = await Engine.open(root, clock=clock, takeover=True)

    await first.close()

    assert await current_owner(objects) == second._ownership.owner
    with pytest.raises(OwnedError):
        await Engine.open(root, clock=clock)
    await second.publish(b"x")
    await second.close()


async def test_the_files_of_earlier_owners_are_removed(root: str, objects: Objects) -> None:
    for _ in range(3):
        await (await Engine.open(root)).close()

    newest = "00000000000000000004"
    async with await Engine.open(root):
        for role in ALL_ROLES:
            # Its first heartbeat comes when it is open.
            wanted = [f"{newest}.alive.json", f"{newest}.json"]
            while await objects.names(f"owners/{role}") != wanted:
                await asyncio.sleep(0)


async def test_a_number_that_was_used_and_removed_wins_nothing(
    in_memory: Objects, clock: ManualClock
) -> None:
    seen = Vacancy(epochs=dict.fromkeys(ALL_ROLES, 1))
    for _ in range(4):
        holder = await Ownership.acquire(in_memory, clock=clock, takeover=True)
    while len(await in_memory.names("owners/queues")) > 1:
        await asyncio.sleep(0)

    with pytest.raises(OwnedError):
        await Ownership.acquire(in_memory, clock=clock, takeover=seen)

    assert await current_owner(in_memory) == holder.owner
    await holder.check()
    await holder.release()


async def test_who_was_replaced_while_it_opened_gives_way(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    url = new_memory_root()
    check = Ownership.check
    others: list[Ownership] = []

    async def replaced_first(ownership: Ownership) -> None:
        objects = Objects.open(url, StoreSettings())
        vacancy = Vacancy(epochs=ownership.epochs)
        others.append(await Ownership.acquire(objects, clock=clock, takeover=vacancy))
        await check(ownership)

    monkeypatch.setattr(Ownership, "check", replaced_first)
    with pytest.raises(FencedError):
        await Engine.open(url, clock=clock)

    assert others[0].is_kept
    await others[0].release()


# --- several that take over at once ---------------------------------------------------------------


async def an_opener(objects: Objects, **changes: Any) -> Owner:
    """Let somebody on another machine have taken all roles, and open the databases now."""
    owner = an_owner(opening=True, **changes)
    await settle_in(objects, owner)
    return owner


async def beat_of_opener(objects: Objects, count: int, *, opening: bool) -> None:
    heartbeat = Heartbeat(holder=an_owner().holder, count=count, at=1_000, opening=opening)
    await OwnerFiles(objects, "queues").beat(1, heartbeat)


async def test_of_many_that_take_a_root_over_at_once_one_serves(root: str) -> None:
    before = await Engine.open(root)
    takers = (Engine.open(root, takeover=True) for _ in range(6))

    found = await asyncio.gather(*takers, return_exceptions=True)

    (winner,) = [one for one in found if isinstance(one, Engine)]
    refused = [one for one in found if isinstance(one, OwnedError)]
    assert len(refused) == 5
    assert all("has just been taken over by" in str(one) for one in refused)
    await winner.publish(b"x")
    await winner._ownership.check()
    await before.close()
    await winner.close()


async def test_a_taker_waits_for_one_that_opens_the_root_and_is_refused_when_it_serves(
    in_memory: Objects, clock: ManualClock
) -> None:
    opener = await an_opener(in_memory)
    taking = asyncio.create_task(Ownership.acquire(in_memory, clock=clock, takeover=True))
    for count in range(1, 5):
        await until_it_waits(clock, taking)
        await beat_of_opener(in_memory, count, opening=True)
        clock.advance_ms(BEAT_MS)
        await asyncio.sleep(0)
    await beat_of_opener(in_memory, 5, opening=False)

    with pytest.raises(OwnedError, match="has just been taken over by 'orders-0'"):
        await while_time_passes(clock, asyncio.wait_for(taking, None))

    assert await current_owner(in_memory) == opener


async def test_a_taker_follows_one_that_gives_up_while_it_opens_the_root(
    in_memory: Objects, clock: ManualClock
) -> None:
    await an_opener(in_memory)
    taking = asyncio.create_task(Ownership.acquire(in_memory, clock=clock, takeover=True))
    await until_it_waits(clock, taking)
    for role in ALL_ROLES:
        await OwnerFiles(in_memory, role).release(1, Release(holder="x", at=1))

    taken = await while_time_passes(clock, asyncio.wait_for(taking, None))

    assert taken.epochs == dict.fromkeys(ALL_ROLES, 2)
    await taken.release()


@pytest.mark.parametrize("lease_ms", [100, LEASE_MS])
async def test_a_taker_follows_one_that_falls_silent_while_it_opens_the_root(
    in_memory: Objects, clock: ManualClock, lease_ms: int
) -> None:
    await an_opener(in_memory, lease_ms=lease_ms)
    began_at = clock.now_ms()
    taking = Ownership.acquire(in_memory, clock=clock, takeover=True)

    taken = await while_time_passes(clock, taking, wait_by_wait=True)

    # On a busy machine who has a short lease may be late with its heartbeat.
    assert clock.now_ms() - began_at == max(lease_ms, 5_000)
    await taken.release()


async def test_a_taker_waits_no_longer_than_half_a_minute(
    in_memory: Objects, clock: ManualClock
) -> None:
    await an_opener(in_memory)
    began_at = clock.now_ms()
    taking = asyncio.create_task(Ownership.acquire(in_memory, clock=clock, takeover=True))
    count = 0
    while not taking.done():
        if waits_ms := clock.waits_ms:
            count += 1
            await beat_of_opener(in_memory, count, opening=True)
            clock.advance_ms(min(waits_ms))
        await asyncio.sleep(0)

    assert clock.now_ms() - began_at == 30_000
    await (await taking).release()


async def test_an_open_that_was_cancelled_leaves_nothing_in_the_way_of_the_next(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    objects = Objects.open(url, StoreSettings())
    s3_environment.stall_after(methods=["PUT"], path_contains=f"{EPOCH_1}.json", times=1)
    opening = asyncio.create_task(Engine.open(url))
    await asyncio.to_thread(s3_environment.wait_until_faulted)

    opening.cancel()
    await asyncio.sleep(0)
    s3_environment.heal()
    with pytest.raises(asyncio.CancelledError):
        await opening

    assert await current_owner(objects) is None
    assert f"{EPOCH_1}.released.json".rpartition("/")[2] in await objects.names("owners/queues")
    await (await Engine.open(url)).close()


async def test_who_meets_a_late_file_of_an_owner_that_is_gone_comes_after_it(
    in_memory: Objects, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = OwnerFiles.create
    late = an_owner(machine=OURS.machine, pid=OURS.pid, process_start=OURS.start)

    async def create_after_another(files: OwnerFiles, epoch: int, owner: Owner) -> bool:
        if epoch == 1:
            await create(files, 1, late)
        return await create(files, epoch, owner)

    monkeypatch.setattr(OwnerFiles, "create", create_after_another)
    taken = await Ownership.acquire(in_memory, clock=clock)

    assert taken.epochs == dict.fromkeys(ALL_ROLES, 2)
    await taken.release()


# --- heartbeats -----------------------------------------------------------------------------------


@pytest.mark.parametrize("already", [0, 50])
async def test_a_heartbeat_costs_the_same_however_old_the_root_is(
    s3_environment: S3Server, new_s3_root: NewRoot, clock: ManualClock, already: int
) -> None:
    url = new_s3_root()
    objects = Objects.open(url, StoreSettings())
    for _ in range(already):
        await (await Ownership.acquire(objects, clock=clock)).release()
    holder = await Ownership.acquire(objects, clock=clock, lease_ms=LEASE_MS)
    await until_it_waits(clock)
    s3_environment.reset_requests(path_contains=url.removeprefix("s3://") + "/")

    for count in range(1, 4):
        clock.advance_ms(BEAT_MS)
        while holder.heartbeats < count or not clock.waits_ms:
            await asyncio.sleep(0)

    requests = s3_environment.requests()
    assert {method: n for method, n in requests.items() if n and method.isupper()} == {
        "PUT": 3 * len(ALL_ROLES),
        "GET": 2 * 3 * len(ALL_ROLES),
    }
    await holder.release()


async def test_an_owner_that_can_not_write_its_heartbeat_warns_and_goes_on(
    s3_environment: S3Server,
    new_s3_root: NewRoot,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = new_s3_root()
    async with await Engine.open(url, clock=clock) as system:
        impatient = Objects.open(url, StoreSettings(outage_timeout_ms=200))
        system._ownership._files = [OwnerFiles(impatient, role) for role in ALL_ROLES]
        await until_it_waits(clock)
        s3_environment.fail(methods=["PUT"], path_contains=".alive.json", times=None)
        for _ in range(6):
            clock.advance_ms(4_000)
            await asyncio.sleep(0)
            await until_it_waits(clock)
        assert [r.levelno for r in caplog.records if "no heartbeat" in r.message] == [
            logging.WARNING
        ]
        await system.publish(b"x")

        objects = Objects.open(url, StoreSettings())
        successor = await Ownership.acquire(objects, clock=ManualClock(), takeover=True)
        while (
            system._ownership.is_kept
        ):  # a look that takes too long is repeated with the next beat
            clock.advance_ms(4_000 if clock.waits_ms else 0)
            await asyncio.sleep(0)
        with pytest.raises(FencedError):
            await system.publish(b"x")
    s3_environment.heal()
    await successor.release()


async def test_an_owner_that_has_failed_does_not_keep_others_out(
    root: str, clock: ManualClock, objects: Objects
) -> None:
    broken = await Engine.open(root, clock=clock)
    # By somebody who does not look who owns the root.
    database = await Database.open(objects, "messages/00000")
    await database.close()
    with pytest.raises(FencedError):
        await broken.publish(b"x")
    await until_it_waits(clock)

    clock.advance_ms(BEAT_MS * 2)
    while broken._ownership.is_kept:
        await asyncio.sleep(0)

    async with await Engine.open(root, clock=clock) as system:
        await system.publish(b"x")
    await broken.close()


# --- standing by ----------------------------------------------------------------------------------


async def test_a_standby_returns_when_there_is_no_owner(objects: Objects) -> None:
    assert await stand_by(objects, clock=ManualClock()) == Vacancy(
        epochs=dict.fromkeys(ALL_ROLES, 0)
    )


async def test_a_standby_follows_an_owner_that_closes(
    root: str, objects: Objects, clock: ManualClock
) -> None:
    ours = ManualClock()
    system = await Engine.open(root, clock=clock)
    waiting = asyncio.create_task(stand_by(objects, clock=ours))
    await until_it_waits(ours, waiting)
    await system.close()

    vacancy = await while_time_passes(ours, asyncio.wait_for(waiting, None))

    async with await Engine.open(root, clock=clock, takeover=vacancy) as again:
        assert again._ownership.epochs == dict.fromkeys(ALL_ROLES, 2)


async def test_a_standby_waits_for_as_long_as_there_are_heartbeats(
    in_memory: Objects, clock: ManualClock
) -> None:
    await settle_in(in_memory, an_owner())
    waiting = asyncio.create_task(stand_by(in_memory, clock=clock))
    for count in range(1, 11):
        await until_it_waits(clock, waiting)
        await beat(in_memory, count)
        clock.advance_ms(BEAT_MS)
        await asyncio.sleep(0)
    await until_it_waits(clock, waiting)
    began_at = clock.now_ms()

    vacancy = await while_time_passes(clock, asyncio.wait_for(waiting, None))

    assert clock.now_ms() - began_at >= LEASE_MS
    assert vacancy.epochs == dict.fromkeys(ALL_ROLES, 1)


@pytest.mark.parametrize("machine", ["ours", "another"])
@pytest.mark.parametrize("lease_ms", [DEFAULT_LEASE_MS, 100, 9_999, 60_000])
async def test_a_standby_is_never_more_than_two_seconds_later_than_the_lease(
    in_memory: Objects, clock: ManualClock, lease_ms: int, machine: str
) -> None:
    owner = an_owner(lease_ms=lease_ms)
    if machine == "ours":  # it was stopped: its process is there
        parent = os.getppid()
        owner = an_owner(
            lease_ms=lease_ms,
            machine=OURS.machine,
            pid=parent,
            process_start=process_start(parent),
            taken_at=clock.now_ms(),
        )
    await settle_in(in_memory, owner)
    waiting = asyncio.create_task(stand_by(in_memory, clock=clock))
    await until_it_waits(clock, waiting)
    await beat(in_memory, 1)  # just after a look
    last_beat_at = clock.now_ms()

    await while_time_passes(clock, asyncio.wait_for(waiting, None), wait_by_wait=True)

    assert lease_ms <= clock.now_ms() - last_beat_at <= lease_ms + 2_000


async def test_a_standby_counts_the_time_that_its_looks_take(
    in_memory: Objects, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await settle_in(in_memory, an_owner(lease_ms=1_000))
    newest = OwnerFiles.newest
    all_have_read = asyncio.Barrier(len(ALL_ROLES))
    time_has_passed = asyncio.Barrier(len(ALL_ROLES))

    async def slowly(files: OwnerFiles) -> Tenure | None:
        found = await newest(files)
        await all_have_read.wait()
        if files.role == ALL_ROLES[0]:
            clock.advance_ms(150)  # of a store that is far away
        await time_has_passed.wait()
        return found

    monkeypatch.setattr(OwnerFiles, "newest", slowly)
    began_at = clock.now_ms()

    await while_time_passes(clock, stand_by(in_memory, clock=clock), wait_by_wait=True)

    # Four waits and five looks. With waits alone it would be 1,900 ms.
    assert 1_000 <= clock.now_ms() - began_at <= 1_600


async def test_a_clock_that_is_set_does_not_make_an_owner_look_dead(
    in_memory: Objects, clock: ManualClock
) -> None:
    await settle_in(in_memory, an_owner())
    waiting = asyncio.create_task(stand_by(in_memory, clock=clock))
    await until_it_waits(clock, waiting)

    clock.advance_ms(365 * 24 * 3_600_000)
    await asyncio.sleep(0)

    await until_it_waits(clock, waiting)
    waiting.cancel()


async def test_a_store_that_is_out_does_not_make_an_owner_look_dead(
    s3_environment: S3Server, new_s3_root: NewRoot, clock: ManualClock
) -> None:
    url = new_s3_root()
    await settle_in(Objects.open(url, StoreSettings()), an_owner())
    impatient = Objects.open(url, StoreSettings(outage_timeout_ms=200))
    waiting = asyncio.create_task(stand_by(impatient, clock=clock))
    s3_environment.fail(times=None)
    for _ in range(5):
        await until_it_waits(clock, waiting)
        clock.advance_ms(LEASE_MS)
        await asyncio.sleep(0)
    await until_it_waits(clock, waiting)
    s3_environment.heal()
    began_at = clock.now_ms()

    await while_time_passes(clock, asyncio.wait_for(waiting, None))

    assert clock.now_ms() - began_at >= LEASE_MS


async def test_of_two_standbys_one_takes_over_and_the_other_is_told(
    root: str, objects: Objects, clock: ManualClock
) -> None:
    await settle_in(objects, an_owner())
    vacancy = await while_time_passes(clock, stand_by(objects, clock=clock))

    found = await asyncio.gather(
        *(Engine.open(root, clock=clock, takeover=vacancy) for _ in range(2)),
        return_exceptions=True,
    )

    (winner,) = [one for one in found if isinstance(one, Engine)]
    assert sum(isinstance(one, OwnedError) for one in found) == 1
    await winner.publish(b"x")
    await winner.close()


# --- finding the broker ---------------------------------------------------------------------------


async def test_clients_find_the_broker_while_it_serves(root: str, objects: Objects) -> None:
    assert await find_broker(root) is None
    async with await Engine.open(root):
        assert await broker_address(objects) is None
    async with await Engine.open(root, address="http://one:1"):
        assert await broker_address(objects) == "http://one:1"
        async with await Engine.open(root, address="http://two:2", takeover=True):
            assert await find_broker(root) == "http://two:2"
    assert await find_broker(root) is None


async def test_looking_for_a_broker_makes_no_root(tmp_path: Path) -> None:
    assert await find_broker(f"file://{tmp_path}/root") is None

    assert list(tmp_path.iterdir()) == []
