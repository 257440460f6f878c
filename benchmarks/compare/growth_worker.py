"""One step of the growth figures, in a process of its own: ``… growth_worker '{"step": …}'``.

Prints JSON. Filling does not sync its commits, since it is not measured, and syncs at the end: what
comes next does not pay for it. Everything else syncs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from benchmarks.common import percentile, run_fast
from benchmarks.compare.content import HEADERS, WrongMessages, slices
from benchmarks.counting import QUEUES, counted
from benchmarks.fresh_process import peak_mib, resident_mib
from opendata_queue import Engine, NewMessage, QueueOptions, StoreSettings

QUEUE: Final = "bench"
OPTIONS: Final = QueueOptions(lease_ms=3_600_000)
PAYLOAD: Final = bytes(range(256))
_AT_REST_S: Final = 4.0
_LONGEST_REST_S: Final = 180.0
_BULK: Final = 5_000
_BATCH: Final = 100
_BATCHES: Final = 8
_SINGLES: Final = 50
_TOGETHER: Final = 500


async def _engine(url: str, *, sync: bool = True) -> Engine:
    return await Engine.open(url, settings=StoreSettings(fsync=sync))


def _new(count: int) -> list[NewMessage]:
    return [NewMessage(PAYLOAD, headers=HEADERS) for _ in range(count)]


async def _routed(system: Engine) -> None:
    await system.all_is_routed()


async def _have_queue(system: Engine) -> None:
    if QUEUE not in await system.list_queues():
        await system.create_queue(QUEUE, options=OPTIONS)


async def fill(spec: dict[str, Any]) -> dict[str, Any]:
    """Let ``waiting`` messages wait."""
    async with await _engine(spec["url"], sync=False) as system:
        await _have_queue(system)
        published = missing = spec["waiting"] - (await system.stats(QUEUE)).available
        while missing > 0:
            await system.publish_many(_new(min(_BULK, missing)))
            missing -= min(_BULK, missing)
            # As fast as it is routed: what waits in memory is bounded.
            await _routed(system)
        await _expect(system, spec["waiting"])
        if published > _BATCH * _BATCHES + 2 * _SINGLES:  # more than one measurement has taken
            await _come_to_rest(system)
    return {}


async def _come_to_rest(system: Engine) -> None:
    """Wait until SlateDB has merged what it will: most backlogs are older than the last rush."""
    kept = [one._upkeep for one in (system._shard.database, system.stores.queues.database)]
    before, since_s = None, time.monotonic()
    deadline_s = since_s + _LONGEST_REST_S
    while time.monotonic() < min(deadline_s, since_s + _AT_REST_S):
        files = [await one.file_counts() for one in kept]
        if files != before or any([await one.is_compacting() for one in kept]):
            before, since_s = files, time.monotonic()
        await asyncio.sleep(0.5)


async def _expect(system: Engine, waiting: int) -> None:
    found = (await system.stats(QUEUE)).available
    if found != waiting:
        raise WrongMessages(f"{found} messages are waiting, not {waiting}")


async def live(spec: dict[str, Any]) -> dict[str, Any]:
    """Let messages go through their whole life until ``done`` of them are history."""
    async with await _engine(spec["url"], sync=False) as system:
        await _have_queue(system)
        missing = spec["done"] - (await system.stats(QUEUE)).done
        while missing > 0:
            count = min(_BULK, missing)
            await system.publish_many(_new(count))
            left = count
            while left:
                messages = await system.claim(QUEUE, min(left, 1_000), wait_ms=10_000)
                await system.ack(QUEUE, *messages)
                left -= len(messages)
            missing -= count
        # Some to measure with.
        await system.publish_many(_new(_BATCH * _BATCHES + 2 * _SINGLES))
        await _routed(system)
    return {}


async def make_queues(spec: dict[str, Any]) -> dict[str, Any]:
    """Have ``queues`` idle queues, and one in use."""
    async with await _engine(spec["url"], sync=False) as system:
        await _have_queue(system)
        made = len(await system.list_queues()) - 1
        for first, count in slices(spec["queues"] - made, _TOGETHER):
            await asyncio.gather(
                *(
                    system.create_queue(f"q{number}", filter=f"tenant = 't{number}'")
                    for number in range(made + first, made + first + count)
                )
            )
        await system.publish_many(_new(_BATCH * _BATCHES + 2 * _SINGLES))
        await _routed(system)
    return {}


async def look(spec: dict[str, Any]) -> dict[str, Any]:
    """What a fresh process needs to open a root and to go on from there."""
    start = time.perf_counter()
    async with await _engine(spec["url"]) as system:
        (first,) = await system.claim(QUEUE, 1)
        opened_ms = (time.perf_counter() - start) * 1e3
        assert first.payload == PAYLOAD
        await system.ack(QUEUE, first)
        gc.collect()
        memory = resident_mib()
        single = await _claimed_and_acked(system, 1, _SINGLES)
        with counted() as counters:
            batch = await _claimed_and_acked(system, _BATCH, _BATCHES)
            commits, size = counters[f"{QUEUES}.commits"], counters[f"{QUEUES}.bytes"]
        await asyncio.sleep(spec.get("stay_s", 0))
        return {
            "open_ms": opened_ms,
            "memory_mib": memory,
            "peak_mib": peak_mib(),
            "claim_1_us": single,
            "claim_100_us": batch,
            "commit_kib": size / commits / 1024,
        }


async def _claimed_and_acked(system: Engine, batch: int, times: int) -> float:
    """Microseconds for a message, of the middle one of some claims and acks."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        messages = await system.claim(QUEUE, batch)
        await system.ack(QUEUE, *messages)
        taken.append((time.perf_counter() - start) * 1e6 / batch)
        if len(messages) != batch or any(one.payload != PAYLOAD for one in messages):
            raise WrongMessages(f"{len(messages)} messages came, not {batch}, or changed ones")
    return percentile(taken, 0.5)


async def one_kind(spec: dict[str, Any]) -> dict[str, Any]:
    """Messages with so many headers, or of such a size: published, claimed, acked."""
    headers = {f"header-{number}": "some value" for number in range(spec["headers"])}
    payload = bytes(spec["bytes"])
    count = max(3, min(2_000, spec["most_bytes"] // max(1, len(payload))))
    batch = min(_BATCH, count)
    async with await _engine(spec["url"]) as system:
        await _have_queue(system)
        with counted() as counters:
            start = time.perf_counter()
            for _ in range(0, count, batch):
                messages = [NewMessage(payload, headers=headers) for _ in range(batch)]
                await system.publish_many(messages)
            published = time.perf_counter() - start
            await _routed(system)
            start = time.perf_counter()
            found = 0
            while messages_in_hand := await system.claim(QUEUE, batch):
                await system.ack(QUEUE, *messages_in_hand)
                if any(one.payload != payload for one in messages_in_hand):
                    raise WrongMessages("a payload was changed")
                found += len(messages_in_hand)
            consumed = time.perf_counter() - start
            sizes = counters.take()
    if found != len(range(0, count, batch)) * batch:
        raise WrongMessages(f"{found} messages came")
    return {
        "publish_us": published / found * 1e6,
        "consume_us": consumed / found * 1e6,
        "log_bytes": sizes["messages.bytes"] / found,
        "queue_bytes": sizes["queues.bytes"] / found,
    }


async def consumers(spec: dict[str, Any]) -> dict[str, Any]:
    """So many consumers at once, each with batches of ten."""
    taken: list[float] = []
    ids: list[int] = []
    async with await _engine(spec["url"]) as system:
        end = time.perf_counter() + spec["seconds"]

        async def consume() -> None:
            while (start := time.perf_counter()) < end:
                messages = await system.claim(QUEUE, 10)
                if not messages:
                    return
                await system.ack(QUEUE, *messages)
                taken.append((time.perf_counter() - start) * 1e3)
                ids.extend(one.message_id for one in messages)

        start = time.perf_counter()
        await asyncio.gather(*(consume() for _ in range(spec["consumers"])))
        seconds = time.perf_counter() - start
    if len(set(ids)) != len(ids):
        raise WrongMessages("a message was handed out twice")
    return {
        "rate": len(ids) / seconds,
        "p50_ms": percentile(taken, 0.5),
        "p99_ms": percentile(taken, 0.99),
    }


STEPS: Final[dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]] = {
    "fill": fill,
    "live": live,
    "make_queues": make_queues,
    "look": look,
    "one_kind": one_kind,
    "consumers": consumers,
}

FILLING: Final = ("fill", "live", "make_queues")


def main() -> None:
    async def step(spec: dict[str, Any]) -> dict[str, Any]:
        return await STEPS[spec["step"]](spec)

    gc.collect()
    gc.freeze()
    spec = json.loads(sys.argv[1])
    found = run_fast(step(spec))
    if spec["step"] in FILLING:
        os.sync()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
