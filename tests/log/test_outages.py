"""The S3 server fails, stalls and drops connections: callers get a truth, or an error."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import pytest

from opendata_queue import (
    Engine,
    NewMessage,
    PublishOptions,
    StoreSettings,
    StoreUnavailableError,
)
from tests.conftest import NewRoot
from tests.support.s3_server import S3Server

PATIENT = StoreSettings(request_timeout_ms=500, outage_timeout_ms=60_000)
SOMEWHAT_PATIENT = StoreSettings(outage_timeout_ms=3_000)
IMPATIENT = StoreSettings(request_timeout_ms=300, outage_timeout_ms=1_000)

FAULTS = ["fail", "fail_after", "stall", "stall_after", "drop", "drop_after"]
each_fault = pytest.mark.parametrize("fault", FAULTS)


def inject(server: S3Server, fault: str, *, path: str = "/wal/", times: int | None) -> None:
    set_fault: Callable[..., None] = getattr(server, fault)
    set_fault(methods={"PUT"}, path_contains=path, times=times)


async def impatient_system(url: str, first: bytes) -> Engine:
    """A system that gives up soon, and has published something.

    On a busy machine that may take longer than its patience: then it is tried again.
    """
    for _ in range(100):
        with contextlib.suppress(StoreUnavailableError):
            system = await Engine.open(url, settings=IMPATIENT)
            try:
                await system.publish(first)
            except StoreUnavailableError:
                await system.close()
            else:
                return system
    raise AssertionError("the machine is too slow for a system with so little patience")


async def payloads_of(url: str) -> set[bytes]:
    """What the store holds, as seen by whoever opens it next."""
    async with await Engine.open(url) as system:
        ids = [entry.message_id async for chunk in system.scan_log() for entry in chunk]
        return {message.payload or b"" for message in await system.read_many(ids) if message}


@each_fault
async def test_a_short_outage_only_makes_a_publish_slow(
    s3_environment: S3Server, new_s3_root: NewRoot, fault: str
) -> None:
    url = new_s3_root()
    system = await Engine.open(url, settings=PATIENT)
    await system.publish(b"before")

    inject(s3_environment, fault, times=2)
    await system.publish(b"during")

    assert s3_environment.faulted() >= 1
    s3_environment.heal()
    await system.publish(b"after")
    await system.close()
    assert await payloads_of(url) == {b"before", b"during", b"after"}


@each_fault
async def test_a_long_outage_is_an_error_that_does_not_pretend_to_know(
    s3_environment: S3Server, new_s3_root: NewRoot, fault: str
) -> None:
    url = new_s3_root()
    system = await impatient_system(url, b"before")

    inject(s3_environment, fault, times=None)
    with pytest.raises(StoreUnavailableError, match="no answer within 1000 ms") as caught:
        await system.publish(b"during")
    what_to_do = "an earlier write failed.*: close it and open it again"
    with pytest.raises(StoreUnavailableError, match=what_to_do) as refused:
        await system.publish(b"stopped")
    assert not refused.value.in_doubt
    await system.close()
    s3_environment.heal()

    assert caught.value.in_doubt
    stored = await payloads_of(url)
    assert b"before" in stored
    assert b"stopped" not in stored
    assert stored <= {b"before", b"during"}


async def test_a_retry_with_the_same_key_is_no_success_before_it_is_durable(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    system = await impatient_system(url, b"before")
    inject(s3_environment, "fail", times=None)

    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await system.publish(b"during", idempotency_key="k")
        ids = [entry.message_id async for chunk in system.scan_log() for entry in chunk]
        assert len(ids) == 1

    await system.close()
    s3_environment.heal()


@pytest.mark.parametrize("fault", ["fail", "stall", "drop"])
async def test_reads_from_a_store_that_is_out_end_with_an_error(
    s3_environment: S3Server, new_s3_root: NewRoot, fault: str
) -> None:
    url = new_s3_root()
    async with await Engine.open(url) as system:
        ids = await system.publish_many([NewMessage(bytes(500))] * 2_000)
    system = await impatient_system(url, b"")
    getattr(s3_environment, fault)(methods={"GET"}, path_contains="/compacted/", times=None)

    with pytest.raises(StoreUnavailableError, match="no answer within 1000 ms"):
        await system.read(ids[1_000])
    with pytest.raises(StoreUnavailableError, match="no answer within 1000 ms"):
        await anext(aiter(system.scan_log(1_000)))

    s3_environment.heal()
    message = None
    while message is None:  # on a busy machine, the first answers may take longer than we wait
        with contextlib.suppress(StoreUnavailableError):
            message = await system.read(ids[1_000])
    assert message.payload == bytes(500)
    await system.close()


async def test_a_store_that_is_out_can_not_be_opened_and_can_be_afterwards(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    s3_environment.fail(times=None)
    with pytest.raises(StoreUnavailableError, match=f"could not .* {url}"):
        await Engine.open(url, settings=IMPATIENT)

    s3_environment.heal()

    await (await Engine.open(url, settings=PATIENT)).close()


async def test_a_database_that_is_out_can_not_be_opened_and_can_be_afterwards(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    s3_environment.fail(path_contains="/manifest/", times=None)
    with pytest.raises(StoreUnavailableError, match=f"could not open {url}/messages/00000"):
        await Engine.open(url, settings=SOMEWHAT_PATIENT)

    s3_environment.heal()

    await (await Engine.open(url, settings=PATIENT)).close()


async def test_a_blob_that_can_not_be_stored_leaves_no_message_and_harms_no_other(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    options = PublishOptions(inline_bytes=10)
    async with await Engine.open(url, settings=SOMEWHAT_PATIENT, options=options) as system:
        s3_environment.fail(path_contains="/blobs/", times=None)
        with pytest.raises(StoreUnavailableError, match=r"could not write .*/blobs/"):
            await system.publish_many([NewMessage(b"small"), NewMessage(b"a large payload")])

        await system.publish(b"other")

    s3_environment.heal()
    assert await payloads_of(url) == {b"other"}


async def test_a_blob_is_tried_as_often_as_the_time_allows(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    options = PublishOptions(inline_bytes=10)
    async with await Engine.open(new_s3_root(), settings=PATIENT, options=options) as system:
        s3_environment.fail(methods={"PUT"}, path_contains="/blobs/", times=11)

        message = await system.read(await system.publish(b"a large payload"))

    assert s3_environment.faulted() == 11
    assert message is not None
    assert message.payload == b"a large payload"


async def test_what_is_acknowledged_under_random_faults_is_there(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    chance = random.Random(7)
    acknowledged: set[bytes] = set()
    tried: set[bytes] = set()

    async def publish(system: Engine, payloads: list[bytes]) -> None:
        tried.update(payloads)
        await system.publish_many([NewMessage(payload) for payload in payloads])
        acknowledged.update(payloads)

    for round_number in range(12):
        quiet = b"quiet %d" % round_number
        system = await impatient_system(url, quiet)
        tried.add(quiet)
        acknowledged.add(quiet)
        for _ in range(chance.randrange(1, 4)):
            inject(
                s3_environment,
                chance.choice(FAULTS),
                path=chance.choice(["/wal/", "/messages/", "/manifest/"]),
                times=chance.choice([1, 2, 5, None]),
            )
        await asyncio.gather(
            *(
                publish(system, [b"%d %d %d" % (round_number, task, n) for n in range(20)])
                for task in range(4)
            ),
            return_exceptions=True,
        )
        await system.close()
        s3_environment.heal()

    stored = await payloads_of(url)
    assert acknowledged <= stored <= tried
    assert len(acknowledged) > 12
