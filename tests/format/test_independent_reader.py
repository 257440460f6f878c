"""Every version-1 record of a real root, read without any code of ours but the reader below.

It knows RFC 0001 and Python's ``struct``, and asks the stock SlateDB binding for the rows: what it
finds must be what the engine was told to do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slatedb.uniffi as slatedb

from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.testing import ManualClock

NOW_MS = 1_763_000_000_000
LEASE_MS = 30_000
WINDOW = 3
LOG = b"opendata-queue/messages/metadata"
HEADERS = {"kind": "größe", "": "no name"}
ESCAPED = {1: b"\x00", 2: b"\x01", 3: b"\xff"}


def terminated(key: bytes, at: int) -> tuple[bytes, int]:
    """``TerminatedBytes`` at an offset, and the offset behind them."""
    text = b""
    while key[at]:
        if key[at] == 1:
            text += ESCAPED[key[at + 1]]
            at += 2
        else:
            text += key[at : at + 1]
            at += 1
    return text, at + 1


def utf8(value: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<H", value, at)
    return value[at + 2 : at + 2 + size].decode(), at + 2 + size


def array(value: bytes, at: int, element: str) -> tuple[list[tuple[Any, ...]], int]:
    """``Array<T>`` of elements of a fixed size, and the offset behind it."""
    (count,) = struct.unpack_from("<H", value, at)
    end = at + 2 + count * struct.calcsize(element)
    return list(struct.iter_unpack(element, value[at + 2 : end])), end


def texts(value: bytes, at: int, count: int) -> tuple[list[str], int]:
    found = []
    for _ in range(count):
        text, at = utf8(value, at)
        found.append(text)
    return found, at


async def rows_of(root: Path, database: str) -> list[tuple[bytes, bytes]]:
    store = slatedb.ObjectStore.resolve("file:///")
    reader = await slatedb.DbReaderBuilder(str(root / database)[1:], store).build()
    span = slatedb.KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)
    iterator = await reader.scan(span)
    rows = []
    while chunk := await iterator.next_batch(1_000):
        rows += [(bytes(row.key), bytes(row.value)) for row in chunk]
    await reader.shutdown()
    return rows


def of_version_1(rows: list[tuple[bytes, bytes]], kind: int) -> Iterator[tuple[bytes, bytes]]:
    return ((key, value) for key, value in rows if key[:2] == bytes((1, kind)))


@pytest.fixture
async def root(tmp_path: Path) -> Path:
    """40 messages with headers, one that is large and one by its URI, in two queues.

    In one of them 20 were claimed: 9 are done, 5 have failed, and 6 are in flight.
    """
    clock = ManualClock(NOW_MS)
    async with await Engine.open(f"file://{tmp_path}/root", clock=clock) as system:
        options = QueueOptions(
            window=WINDOW, max_attempts=1, lease_ms=LEASE_MS, done_retention_seconds=77
        )
        await system.create_queue("shop/sizes", filter="kind = 'größe' PRIORITY 3", options=options)
        await system.create_queue("all", options=QueueOptions(window=WINDOW))
        await system.publish_many(
            [NewMessage(b"%d" % n, headers=HEADERS, retention_seconds=n * 1_000) for n in range(40)]
        )
        await system.publish(b"L" * 70_000)
        await system.publish(payload_uri="s3://bucket/key")
        await system.all_is_routed()
        claimed = await system.claim("shop/sizes", 20, consumer="ännchen")
        await system.ack("shop/sizes", *claimed[:9])
        await system.nack("shop/sizes", *claimed[9:14], error="no")
    return tmp_path / "root"


async def test_the_messages_can_be_read_with_the_rfc_alone(root: Path) -> None:
    rows = await rows_of(root, "messages/00000")

    payloads: dict[int, bytes | str] = {}
    metadata: dict[int, tuple[Any, ...]] = {}
    for key, value in of_version_1(rows, 0x01):
        if len(key) == 10:
            (message_id,) = struct.unpack(">Q", key[2:])
            if value[0] == 1:
                (size,) = struct.unpack_from("<H", value, 1)
                assert len(value) == 3 + size
                payloads[message_id] = value[3:]
            else:
                assert value[0] == 2
                payloads[message_id], end = utf8(value, 1)
                assert end == len(value)
        else:
            name, at = terminated(key, 2)
            (sequence,) = struct.unpack(">Q", key[at:])
            message_id, *fields, count = struct.unpack_from("<QqqqIB", value)
            headers, end = texts(value, 37, 2 * count)
            assert (name, sequence, end) == (LOG, message_id, len(value))
            metadata[message_id] = (*fields, dict(zip(headers[::2], headers[1::2], strict=True)))
    ((_, block),) = of_version_1(rows, 0x02)
    first, size = struct.unpack(">QQ", block)

    ids = range(42)
    assert [payloads[one] for one in ids[:40]] == [b"%d" % one for one in ids[:40]]
    large = payloads[40]
    assert isinstance(large, str)
    assert "blobs/00000/" in large
    assert payloads[41] == "s3://bucket/key"
    times = (NOW_MS, NOW_MS, NOW_MS)
    assert {one: metadata[one] for one in ids[:40]} == {
        one: (*times, one * 1_000, HEADERS) for one in ids[:40]
    }
    assert metadata[41] == (*times, 0, {})
    assert first <= 41 < first + size


async def test_the_queues_can_be_read_with_the_rfc_alone(root: Path) -> None:
    rows = await rows_of(root, "queues/00000")

    def records(kind: int) -> dict[str, bytes]:
        found = {}
        for key, value in of_version_1(rows, kind):
            name, end = terminated(key, 2)
            assert end == len(key)
            found[name.decode()] = value
        return found

    active = records(0x02)
    available, end = array(active["shop/sizes"], 0, "<QBqqH")
    in_flight, end = array(active["shop/sizes"], end, "<QBqqH")
    assert end == len(active["shop/sizes"])
    assert 0 < len(available) <= WINDOW
    deadlines = {0: 0} | {n: NOW_MS + n * 1_000_000 for n in range(1, 40)}
    assert available == [
        (one, 3, NOW_MS, deadlines[one], 0) for one in range(20, 20 + len(available))
    ]
    assert sorted(in_flight) == [(one, 3, NOW_MS, NOW_MS + LEASE_MS, 1) for one in range(14, 20)]

    done, end = array(records(0x03)["shop/sizes"], 0, "<QqH")
    assert end == len(records(0x03)["shop/sizes"])
    assert done == [(one, NOW_MS, 1) for one in range(9)]
    failed, end = array(records(0x04)["shop/sizes"], 0, "<QqH")
    assert end == len(records(0x04)["shop/sizes"])
    assert failed == [(one, NOW_MS, 1) for one in range(9, 14)]

    attempts = {}
    for key, value in of_version_1(rows, 0x05):
        (message_id,) = struct.unpack(">Q", key[2:])
        attempts[message_id], end = texts(value, 2, struct.unpack_from("<H", value)[0])
        assert end == len(value)
    assert attempts == {one: ["ännchen"] for one in range(20)}

    config = records(0x06)["shop/sizes"]
    text, end = utf8(config, 1)
    assert (config[0], text) == (1, "kind = 'größe' PRIORITY 3")
    assert struct.unpack("<HI", config[end:]) == (1, 77)
    others, end = array(records(0x02)["all"], 0, "<QBqqH")
    assert (len(others), array(records(0x02)["all"], end, "<QBqqH")[0]) == (WINDOW, [])
