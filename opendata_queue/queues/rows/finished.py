"""The rows of what is finished in a queue: sealed buckets, and what is known of failed messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from odq_encodings import (
    DoneMessage,
    DoneMessages,
    DoneMessagesKey,
    FailedMessages,
    Failure,
    FailureKey,
    RetentionFloor,
    RetentionFloorKey,
    SealedDoneKey,
    SealedFailedKey,
)
from opendata_queue.model.options import FOR_EVER_MS
from opendata_queue.queues.lanes import LAST_ID
from opendata_queue.queues.rows.overlay import Commits
from opendata_queue.store import DatabaseReads


class FinishedRows:
    """Writes and reads them, but for the sealed buckets of failed messages."""

    __slots__ = (
        "_committer",
        "_database",
        "_done_key",
        "_queue_id",
    )

    def __init__(self, queue_id: bytes, database: DatabaseReads, committer: Commits) -> None:
        self._queue_id = queue_id
        self._database = database
        self._committer = committer
        self._done_key = DoneMessagesKey(queue_id=queue_id).encode()

    # --- writing ----------------------------------------------------------------------------------

    def seal_done(self, bucket: int, value: bytes) -> None:
        self._committer.rows.put(
            SealedDoneKey(queue_id=self._queue_id, bucket=bucket).encode(), value
        )

    def seal_failed(self, bucket: int, value: bytes) -> None:
        self._committer.rows.put(
            SealedFailedKey(queue_id=self._queue_id, bucket=bucket).encode(), value
        )

    def rewrite_done(self, bucket: int, entries: Iterable[bytes]) -> None:
        """Replace what a sealed bucket of done messages holds; an empty one is deleted."""
        key = SealedDoneKey(queue_id=self._queue_id, bucket=bucket).encode()
        if left := list(entries):
            self._committer.rows.put(key, DoneMessages.join(left))
        else:
            self._committer.rows.delete(key)

    def put_failure(self, message_id: int, failure: Failure) -> None:
        key = FailureKey(queue_id=self._queue_id, message_id=message_id).encode()
        self._committer.rows.put(key, failure.encode())

    def delete_failure(self, message_id: int) -> None:
        key = FailureKey(queue_id=self._queue_id, message_id=message_id).encode()
        self._committer.rows.delete(key)

    def put_floor(self, floor: RetentionFloor) -> None:
        """Where the sealed buckets begin."""
        key = RetentionFloorKey(queue_id=self._queue_id).encode()
        self._committer.rows.put(key, floor.encode())

    # --- reading ----------------------------------------------------------------------------------

    async def sealed_done(self, first: int, behind: int) -> dict[int, bytes]:
        """Those done buckets from ``first`` up to, not including, ``behind`` that are there."""
        prefix = SealedDoneKey.prefix(self._queue_id)
        pack = SealedDoneKey.suffix.struct
        found = {}
        async for chunk in self._database.scan(
            prefix + pack.pack(first), prefix + pack.pack(behind)
        ):
            for key, value in chunk:
                found[pack.unpack(key[len(prefix) :])[0]] = value
        return found

    async def oldest_done(self, floor: int, count: int) -> list[tuple[int, DoneMessages]]:
        """The oldest sealed buckets of done messages, none of which is before ``floor``."""
        found = []
        async for number, key, value in _oldest(
            self._database, self._queue_id, SealedDoneKey, floor, count
        ):
            found.append((number, self._database.decode(DoneMessages.decode, key, value)))
        return found

    async def sealed_done_at(self, bucket: int) -> bytes | None:
        key = SealedDoneKey(queue_id=self._queue_id, bucket=bucket).encode()
        return await self._database.get(key)

    def decode_done(self, value: bytes) -> tuple[DoneMessage, ...]:
        return self._database.decode(DoneMessages.decode, self._done_key, value).messages

    def decode_done_entry(self, value: bytes) -> DoneMessage:
        return self._database.decode(DoneMessage.decode, self._done_key, value)

    async def failures(
        self, after_id: int = -1, *, limit: int, since: int = FOR_EVER_MS
    ) -> list[tuple[int, Failure]]:
        """Failed messages by ascending id, those left out that failed before a time."""
        prefix = FailureKey.prefix(self._queue_id)
        end = prefix + FailureKey.suffix.struct.pack(LAST_ID) + b"\x00"
        found: list[tuple[int, Failure]] = []
        while len(found) < limit:
            start = prefix + FailureKey.suffix.struct.pack(after_id + 1)
            wanted, seen = limit - len(found), 0
            async for chunk in self._database.scan(start, end, limit=wanted):
                for key, value in chunk:
                    seen += 1
                    (after_id,) = FailureKey.suffix.struct.unpack(key[len(prefix) :])
                    failure = self._database.decode(Failure.decode, key, value)
                    if failure.failed_at >= since:
                        found.append((after_id, failure))
            if seen < wanted:
                break
        return found

    async def failures_of(
        self, message_ids: Iterable[int], *, since: int = FOR_EVER_MS
    ) -> dict[int, Failure]:
        """Those of the messages that have failed, and not before a time."""

        def key_of(message_id: int) -> bytes:
            return FailureKey(queue_id=self._queue_id, message_id=message_id).encode()

        values = await self._database.get_by_id(message_ids, key_of)
        found = {
            one: self._database.decode(Failure.decode, key_of(one), value)
            for one, value in values.items()
        }
        return {one: failure for one, failure in found.items() if failure.failed_at >= since}


class FailedBuckets:
    """The sealed buckets of failed messages, which are rewritten when one is replayed or forgotten.

    For the one that holds the queue's ``Indexes``: each must find what the other has left.
    """

    __slots__ = (
        "_committer",
        "_database",
        "_queue_id",
    )

    def __init__(self, queue_id: bytes, database: DatabaseReads, committer: Commits) -> None:
        self._queue_id = queue_id
        self._database = database
        self._committer = committer

    async def oldest(self, floor: int, count: int) -> list[tuple[int, FailedMessages]]:
        """The same for failed messages."""
        found = []
        async for number, key, value in _oldest(
            self._database, self._queue_id, SealedFailedKey, floor, count
        ):
            found.append((number, self._database.decode(FailedMessages.decode, key, value)))
        return found

    async def read(self, buckets: set[int]) -> dict[int, dict[int, bytes]]:
        """The entries of sealed buckets of failed messages, by message, of those that are there."""
        ordered = sorted(buckets)
        keys = [SealedFailedKey(queue_id=self._queue_id, bucket=one).encode() for one in ordered]
        found = {}
        for number, key, value in zip(
            ordered, keys, await self._database.get_many(keys), strict=True
        ):
            if value is not None:
                bucket = self._database.decode(FailedMessages.decode, key, value)
                found[number] = {m.message_id: m.encode() for m in bucket.messages}
        return found

    def rewrite(self, bucket: int, entries: dict[int, bytes]) -> None:
        """Replace what a sealed bucket of failed messages holds; an empty one is deleted."""
        key = SealedFailedKey(queue_id=self._queue_id, bucket=bucket).encode()
        if entries:
            self._committer.rows.put(key, FailedMessages.join(entries.values()))
        else:
            self._committer.rows.delete(key)


async def _oldest(
    database: DatabaseReads,
    queue_id: bytes,
    kind: type[SealedDoneKey] | type[SealedFailedKey],
    floor: int,
    count: int,
) -> AsyncIterator[tuple[int, bytes, bytes]]:
    prefix, pack = kind.prefix(queue_id), kind.suffix.struct
    start, end = prefix + pack.pack(floor), prefix + pack.pack(LAST_ID)
    async for chunk in database.scan(start, end, limit=count):
        for key, value in chunk:
            yield pack.unpack(key[len(prefix) :])[0], key, value


async def failures_in(
    database: DatabaseReads, queue_ids: Sequence[bytes], message_id: int
) -> list[Failure | None]:
    """How one message has failed in each of some queues, given by their ids."""
    keys = [FailureKey(queue_id=one, message_id=message_id).encode() for one in queue_ids]
    values = await database.get_many(keys)
    return [
        None if value is None else database.decode(Failure.decode, key, value)
        for key, value in zip(keys, values, strict=True)
    ]
