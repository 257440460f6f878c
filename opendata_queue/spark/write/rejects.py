"""Rows that can't be messages, kept for people to read: nothing vanishes.

Each task attempt writes JSON lines under ``<rejectsPath>/<job>/attempts/``. Right before the driver
commits it writes there which attempts count for this very commit, under the commit's ``holder``.
After the commit their files are moved to ``<rejectsPath>/<job>/part-<partition>-<number>.jsonl``.
So these parts say what the run that was committed has rejected, and nothing of other runs: what
their attempts have left stays where it is. A driver that dies in between leaves the rest to the
next run of the job, which finds the commit and, by its holder, what counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opendata_queue.spark.rows.columns import BadRow, Batch
from opendata_queue.store import Objects, StoreSettings

_FILE_BYTES: Final = 8 * 1024 * 1024
_SHOWN_BYTES: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedFiles:
    """What a task attempt has written."""

    attempt: str = ""
    files: int = 0
    rows: int = 0


class Rejects:
    """Writes the rejected rows of one task attempt."""

    def __init__(self, url: str, job: str, partition: int, attempt: str) -> None:
        self._objects = Objects.open(url, StoreSettings())
        self._folder = _attempts(job, attempt)
        self._partition = partition
        self._attempt = attempt
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._files = 0
        self._rows = 0

    async def add(self, batch: Batch, first_row: int, bad: Sequence[BadRow]) -> None:
        for one, row in zip(bad, _selected(batch, [one.place for one in bad]), strict=True):
            line = json.dumps(
                {
                    "partition": self._partition,
                    "row": first_row + one.place,
                    "reason": one.reason,
                    "columns": row,
                },
                ensure_ascii=False,
            ).encode("utf-8", "backslashreplace")
            self._lines.append(line)
            self._size_bytes += len(line)
            self._rows += 1
            if self._size_bytes >= _FILE_BYTES:
                await self._write()

    async def finish(self) -> RejectedFiles:
        if self._lines:
            await self._write()
        return RejectedFiles(attempt=self._attempt, files=self._files, rows=self._rows)

    async def _write(self) -> None:
        data = b"".join(line + b"\n" for line in self._lines)
        await self._objects.write(f"{self._folder}/{self._files:05}.jsonl", data)
        self._files += 1
        self._lines = []
        self._size_bytes = 0


async def choose_rejects(
    url: str, job: str, holder: str, parts: Sequence[tuple[int, RejectedFiles]]
) -> None:
    """Note which attempts count if the commit of ``holder`` does."""
    chosen = [
        {"partition": partition, "attempt": one.attempt, "files": one.files}
        for partition, one in sorted(parts, key=lambda part: part[0])
        if one.files
    ]
    objects = Objects.open(url, StoreSettings())
    await objects.write(_chosen(job, holder), json.dumps(chosen).encode())


async def publish_rejects(url: str, job: str, holder: str) -> None:
    """Put the files that count where people expect them; doing it again is no harm."""
    objects = Objects.open(url, StoreSettings())
    note = await objects.read(_chosen(job, holder))
    if note is None:
        return  # it was done before, or the job was run without this path
    for one in json.loads(note):
        for number in range(one["files"]):
            data = await objects.read(f"{_attempts(job, one['attempt'])}/{number:05}.jsonl")
            if data is not None:  # else another driver has just finished this
                await objects.write(f"{job}/part-{one['partition']:05}-{number:05}.jsonl", data)
    for one in json.loads(note):
        for number in range(one["files"]):
            await objects.delete(f"{_attempts(job, one['attempt'])}/{number:05}.jsonl")
    await objects.delete(_chosen(job, holder))


async def count_rejects(url: str, job: str) -> int:
    """How many rows of a job were rejected."""
    objects = Objects.open(url, StoreSettings())
    rows = 0
    for name in await objects.names(job):
        if not name.startswith("part-"):
            continue
        data = await objects.read(f"{job}/{name}")
        rows += 0 if data is None else data.count(b"\n")
    return rows


def describe(batch: Batch, bad: BadRow) -> str:
    """The row in a few words, for an error."""
    (row,) = _selected(batch, [bad.place])
    text = json.dumps(row, ensure_ascii=False)
    return text if len(text) <= _SHOWN_BYTES else f"{text[:_SHOWN_BYTES]}…"


def _attempts(job: str, attempt: str) -> str:
    return f"{job}/attempts/{attempt}"


def _chosen(job: str, holder: str) -> str:
    return f"{job}/attempts/chosen-{holder}.json"


def _selected(batch: Batch, places: Sequence[int]) -> Iterator[dict[str, Any]]:
    for place in places:
        row = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                row[name] = _readable(column[place].as_py())
            except UnicodeDecodeError:
                row[name] = _readable(column[place].as_buffer().to_pybytes())
        yield row


def _readable(value: Any) -> Any:
    """A value that JSON can hold."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"hex": value.hex()}
    if isinstance(value, list):
        return [_readable(one) for one in value]
    if isinstance(value, tuple):
        return tuple(_readable(one) for one in value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
