"""SlateDB without a queue: the limit of what can be built on it, in all tiers of the writer."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from benchmarks.compare.content import HEADERS
from benchmarks.compare.contract import Address, Client, Received, System, no_server
from benchmarks.compare.servers import release
from benchmarks.compare.systems.moto import BUCKET, no_moto, s3_server
from odq_encodings import (
    encode_headers,
    encode_inline_payload,
    encode_message_metadata,
    encode_metadata_log_key,
    encode_payload_key,
)
from opendata_queue import StoreSettings
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.store.rows.writer import TIER_VARIABLE

_QUEUE_ROW = bytes(90)
_TRY = "from opendata_queue.store.rows.writer import active_tier; active_tier()"


class RawClient(Client):
    """Three puts for a message: payload, metadata, and what a queue has to remember of it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers = itertools.count()
        self._headers = encode_headers(HEADERS.items())

    async def publish(self, payloads: Sequence[bytes]) -> None:
        rows = Rows()
        for payload, number in zip(payloads, self._numbers, strict=False):
            key = encode_payload_key(number)
            rows.put(key, encode_inline_payload(payload))
            rows.put(
                encode_metadata_log_key(number),
                encode_message_metadata(number, 1, 1, 1, 0, len(HEADERS), self._headers),
            )
            rows.put(b"\x02" + key[1:], _QUEUE_ROW)
        await self._database.commit(rows)

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        raise NotImplementedError("rows are not consumed")

    async def ack(self, handles: Sequence[Any]) -> None:
        raise NotImplementedError("rows are not consumed")

    async def depth(self) -> int:
        found = 0
        first, behind = b"\x02\x01", b"\x02\x02"
        async for chunk in self._database.scan(first, behind):
            found += len(chunk)
        return found


@functools.cache
def _missing(tier: str) -> str | None:
    """A process chooses its tier once: so another one has to try."""
    done = subprocess.run(
        [sys.executable, "-c", _TRY],
        env={**os.environ, TIER_VARIABLE: tier},
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def raw(tier: str, *, s3: bool = False, fsync: bool = False) -> System:
    @contextlib.asynccontextmanager
    async def connect(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
        os.environ[TIER_VARIABLE] = tier
        url = f"s3://{BUCKET}/{queue}"
        if s3:
            os.environ.update(address)
        else:
            url = f"file://{address['folder']}/{queue}"
        objects = Objects.open(url, StoreSettings(fsync=fsync))
        database = await Database.open(objects, "raw")
        try:
            yield [RawClient(database) for _ in range(count)]
        finally:
            await database.close()

    where = "moto S3" if s3 else "file, fsync" if fsync else "file"
    return System(
        key=f"raw-{tier}{'-s3' if s3 else '-fsync' if fsync else ''}",
        name=f"raw SlateDB, 3 puts per message, {where}, {tier}",
        serve=s3_server if s3 else no_server,
        connect=connect,
        missing=lambda: (no_moto() if s3 else None) or _missing(tier),
        version=lambda: release("slatedb"),
        settings=f"batch writer: {tier}",
        durable=s3 or fsync,
        workloads=frozenset({"W1", "W2", "W2L"}),
        one_process=True,
        in_memory=s3,
        ours=True,
    )
