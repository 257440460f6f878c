"""Every file of a root and every reference in it, read and checked (``odq doctor --deep``).

Nothing is written, and no owner is disturbed. What is kept in memory does not grow with the number
of messages: all is read in parts.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Final

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    BacklogEntry,
    BacklogKey,
    BulkJobKey,
    BulkShard,
    BulkShardKey,
    InlinePayload,
    MessageBlobKey,
    QueueConfigKey,
    RecordType,
    ScheduleEntry,
    ScheduleKey,
    decode_payload,
    encode_payload_key,
)
from opendata_queue.log.payloads import BlobPlace, is_user_uri, read_blob
from opendata_queue.log.readers import ShardReaders
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.model.ids import OWNERS_SHARD, first_id_of, is_bulk, shard_of
from opendata_queue.model.paths import (
    BULK_SHARDS_FOLDER,
    COMMITS_FOLDER,
    MESSAGES_FOLDER,
    OWNERS_FOLDER,
    QUEUES_PATH,
    blobs_path,
    messages_path,
)
from opendata_queue.root.commit_files import CommitFiles
from opendata_queue.root.features import KNOWN_FEATURES, feature_path, named_features
from opendata_queue.root.owner_files import QUEUES_ROLE, OwnerFiles, messages_role
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import (
    DatabaseReader,
    Objects,
    Problem,
    check_database,
    has_journal,
    unproven,
)
from opendata_queue.store.objects.control_files import check_seal
from opendata_queue.store.problems import REPAIR

QUEUES: Final = QUEUES_PATH
_AT_ONCE: Final = 1_000
_SHARD: Final = re.compile(r"\d{5,10}")
_NOTHING: Final = "nothing"

Progress = Callable[[str], None]


class RootCheck:
    """One check of all of a root."""

    def __init__(self, objects: Objects, clock: Clock, progress: Progress) -> None:
        self._objects = objects
        self._clock = clock
        self._progress = progress
        self._files = ShardFiles(objects)
        self._commits = CommitFiles(objects)
        self.files = 0
        self.databases = 0
        self.blobs = 0
        self.entries = 0
        self.damaged: set[str] = set()
        """Databases whose files are damaged: SlateDB would ask for ever for what they lack."""

    # --- control files ----------------------------------------------------------------------------

    async def control_files(self) -> AsyncIterator[Problem]:
        """All of them but ``system.json``."""
        features = await named_features(self._objects)
        for missing in sorted(KNOWN_FEATURES - features) if features else ():
            yield _problem(
                feature_path(missing),
                "is missing",
                "nothing; but a release that does not know it would not be stopped",
                "the next open for writing makes it again",
            )
        for name in sorted(features):
            async for problem in self._sealed(feature_path(name), _NOTHING):
                yield problem
        for role in await self._objects.folders(OWNERS_FOLDER):
            for path in await OwnerFiles(self._objects, role).paths():
                async for problem in self._sealed(path, f"who had the role {role}"):
                    yield problem
        async for problem in self._reservations():
            yield problem
        async for problem in self._job_files():
            yield problem

    async def _sealed(self, path: str, lost: str) -> AsyncIterator[Problem]:
        self.files += 1
        content = await self._objects.read(path)
        if content is None:
            return  # removed since it was listed
        try:
            check_seal(content, path)
            if not content.startswith(b"{") or not content.endswith(b"}"):
                raise CorruptStoreError(f"{path} is damaged: it is cut, or no JSON object")
        except CorruptStoreError as error:
            yield _problem(path, _wrong(error, path), lost, REPAIR)

    async def _reservations(self) -> AsyncIterator[Problem]:
        live = await self._files.live_shards()
        for shard in live:
            async for problem in self._read(self._files.read(shard), self._files.path_of(shard)):
                yield problem
        self._progress(BULK_SHARDS_FOLDER)
        after = 0
        while some := await self._files.bulk_shards(after=after, limit=_AT_ONCE):
            for shard in some:
                path = self._files.path_of(shard)
                async for problem in self._read(self._files.read(shard), path):
                    yield problem
            after = some[-1]
        for shard in sorted(set(await self._live_folders()) - {OWNERS_SHARD, *live}):
            yield _problem(
                self._files.path_of(shard),
                f"is missing, and {messages_path(shard)} is there",
                "the messages of that shard that no queue has got yet",
                REPAIR,
            )

    async def _job_files(self) -> AsyncIterator[Problem]:
        self._progress(COMMITS_FOLDER)
        for job in await self._commits.jobs():
            path = self._commits.path_of(job)
            async for problem in self._read(
                self._commits.read(job), path, "the messages of that job"
            ):
                yield problem

    async def _read(
        self, reading: Any, path: str, lost: str = "who reserved it, and when"
    ) -> AsyncIterator[Problem]:
        self.files += 1
        try:
            await reading
        except CorruptStoreError as error:
            yield _problem(path, _wrong(error, self._objects.location.url_of(path)), lost, REPAIR)

    # --- databases --------------------------------------------------------------------------------

    async def _live_folders(self) -> list[int]:
        folders = await self._objects.folders(MESSAGES_FOLDER)
        numbers = (int(name) for name in folders if _SHARD.fullmatch(name))
        return [number for number in numbers if not is_bulk(number)]

    async def live_paths(self) -> list[str]:
        """The databases that owners of roles write."""
        live = {OWNERS_SHARD, *await self._files.live_shards(), *await self._live_folders()}
        return [QUEUES, *map(messages_path, sorted(live))]

    async def acknowledged(self, path: str) -> int:
        """Up to where the newest owner has said that a live database is durable (RFC 0013)."""
        tenure = await OwnerFiles(self._objects, role_of(path)).newest()
        return 0 if tenure is None else tenure.durable

    async def live_databases(self, *, deep: bool) -> AsyncIterator[Problem]:
        for path in await self.live_paths():
            self._progress(path)
            self.databases += 1
            acknowledged = await self.acknowledged(path)
            for problem in await check_database(
                self._objects, path, deep=deep, acknowledged=acknowledged
            ):
                self.damaged.add(path)
                yield problem

    async def bulk_databases(self) -> AsyncIterator[Problem]:
        """Those that are registered or committed; what no commit names does not exist."""
        async with aclosing(self._bulk_shards()) as shards:
            async for shard, end in shards:
                path = messages_path(shard)
                self._progress(path)
                self.databases += 1
                problem = await unproven(self._objects, path)
                if problem is not None:
                    self.damaged.add(path)
                    yield problem
                    continue
                problems = await check_database(self._objects, path, deep=True)
                if not problems and end and not await self._objects.names(f"{path}/manifest"):
                    problems = [_problem(f"{path}/", "is missing", f"{end} messages", REPAIR)]
                for problem in problems:
                    self.damaged.add(path)
                    yield problem

    async def _bulk_shards(self) -> AsyncGenerator[tuple[int, int]]:
        """All bulk shards that exist, and the end of each."""
        for job in await self._commits.jobs():
            try:
                commit = await self._commits.read(job)
            except CorruptStoreError:
                continue
            for one in commit.shards if commit is not None else ():
                yield one.shard, one.next_sequence
        committed = set(await self._commits.jobs())
        async with aclosing(self._rows(QUEUES, BulkShardKey(number=0).encode(), b"\x01\x12")) as it:
            async for database, key, value in it:
                row = database.decode(BulkShard.decode, key, value)
                if row.job not in committed:
                    yield row.shard, row.next_sequence

    async def uncommitted_jobs(self) -> dict[str, int]:
        """Jobs that have filled shards and that no commit names, and how many shards.

        They are running, or were given up, or their commit was lost: the files don't show which.
        """
        committed = set(await self._commits.jobs())
        found: dict[str, int] = {}
        if QUEUES in self.damaged:
            return found
        queues = await DatabaseReader.look(self._objects, QUEUES)
        try:
            after = 0
            while some := await self._files.bulk_shards(after=after, limit=_AT_ONCE):
                for shard in some:
                    reservation = await self._files.read(shard)
                    job = None if reservation is None else reservation.job
                    if job is None or job in committed:
                        continue
                    row = queues and await queues.get(BulkJobKey(job=job).encode())
                    proof = await self._objects.size_of(f"{messages_path(shard)}/complete.json")
                    if row is None and proof:
                        found[job] = found.get(job, 0) + 1
                after = some[-1]
        finally:
            if queues is not None:
                await queues.close()
        return found

    async def _rows(
        self, path: str, start: bytes, end: bytes
    ) -> AsyncGenerator[tuple[DatabaseReader, bytes, bytes]]:
        """Rows of a database; nothing if there is none, or if it is damaged."""
        if path in self.damaged:
            return
        database = await DatabaseReader.look(self._objects, path)
        if database is None:
            return
        try:
            async for rows in database.scan(start, end):
                for key, value in rows:
                    yield database, key, value
        finally:
            await database.close()

    # --- blobs ------------------------------------------------------------------------------------

    async def blob_references(self) -> AsyncIterator[Problem]:
        """Each blob that a message refers to is there, and is what the message says."""
        for shard in [OWNERS_SHARD, *await self._files.live_shards()]:
            async for problem in self._blobs_of(shard):
                yield problem
        async with aclosing(self._bulk_shards()) as bulk:
            async for shard, _ in bulk:
                async for problem in self._blobs_of(shard):
                    yield problem

    async def _blobs_of(self, shard: int) -> AsyncIterator[Problem]:
        self._progress(blobs_path(shard))
        start = MessageBlobKey(message_id=first_id_of(shard)).encode()
        end = MessageBlobKey(message_id=first_id_of(shard + 1) - 1).encode() + b"\x00"
        async with aclosing(self._rows(messages_path(shard), start, end)) as rows:
            async for database, key, _ in rows:
                message_id = database.decode(MessageBlobKey.decode, key, key).message_id
                problem = await self._blob_problem(database, message_id)
                if problem is not None:
                    yield problem

    async def _blob_problem(self, database: DatabaseReader, message_id: int) -> Problem | None:
        key = encode_payload_key(message_id)
        value = await database.get(key)
        if value is None:
            return None  # past its retention: the blob goes with the next pass
        payload = database.decode(decode_payload, key, value)
        if isinstance(payload, InlinePayload) or is_user_uri(payload.uri):
            return None
        self.blobs += 1
        place = BlobPlace.parse(payload.uri, f"message {message_id}")
        lost = f"the payload of message {message_id}"
        advice = "restore it from a backup; its message is a dead letter once it was claimed"
        try:
            if await read_blob(self._objects, place) is not None:
                return None
        except CorruptStoreError as error:
            url = self._objects.location.url_of(place.path)
            return _problem(place.path, _wrong(error, url), lost, advice)
        if await database.get(key) is None:
            return None  # retention was here meanwhile
        return _problem(place.path, "is missing", lost, advice)

    # --- entries of queues ------------------------------------------------------------------------

    async def queue_entries(self) -> AsyncIterator[Problem]:
        """Each message that waits in a queue is there, unless its retention is over."""
        if has_journal(self._objects, messages_path(OWNERS_SHARD)):
            self._progress("a journal was left: messages in it are not seen before the next open")
        readers = ShardReaders(self._objects, self._clock, leave_no_trace=True)
        try:
            async with aclosing(self._waiting()) as entries:
                some: list[tuple[bytes, int, int]] = []
                async for entry in entries:
                    some.append(entry)
                    if len(some) >= _AT_ONCE:
                        async for problem in self._gone(readers, some):
                            yield problem
                        some = []
                async for problem in self._gone(readers, some):
                    yield problem
        finally:
            await readers.close()

    async def _waiting(self) -> AsyncGenerator[tuple[bytes, int, int]]:
        """Queue, message and deadline (0 for none) of all that waits."""
        prefix = RecordType.QUEUE_CONFIG.prefix
        async with aclosing(self._rows(QUEUES, prefix, prefix + b"\xff" * 64)) as queues:
            async for database, key, _ in queues:
                queue_id = database.decode(QueueConfigKey.decode, key, key).queue_id
                self._progress(f"queue {queue_id.decode(errors='replace')}")
                async for entry in _entries_of(database, queue_id):
                    self.entries += 1
                    yield queue_id, *entry

    async def _gone(
        self, readers: ShardReaders, entries: Iterable[tuple[bytes, int, int]]
    ) -> AsyncIterator[Problem]:
        now_ms = self._clock.now_ms()
        due = [
            one
            for one in entries
            if (not one[2] or one[2] > now_ms)
            and messages_path(shard_of(one[1])) not in self.damaged
        ]
        there = await readers.read_metadata({message_id for _, message_id, _ in due})
        left = has_journal(self._objects, messages_path(OWNERS_SHARD))
        for queue_id, message_id, _ in due:
            if message_id in there or (left and shard_of(message_id) == OWNERS_SHARD):
                continue
            yield _problem(
                messages_path(shard_of(message_id)),
                f"has no message {message_id}, which waits in queue "
                f"{queue_id.decode(errors='replace')}",
                "that message",
                "restore the root from a backup; else it is dropped when it is claimed",
            )


async def _entries_of(database: DatabaseReader, queue_id: bytes) -> AsyncIterator[tuple[int, int]]:
    key = ActiveMessagesKey(queue_id=queue_id).encode()
    value = await database.get(key)
    if value is not None:
        for one in database.decode(ActiveMessages.decode, key, value).available:
            yield one.message_id, one.retention_deadline
    kinds: tuple[tuple[Any, Any], ...] = ((BacklogKey, BacklogEntry), (ScheduleKey, ScheduleEntry))
    for kind, entry in kinds:
        prefix = kind.prefix(queue_id)
        async for rows in database.scan(prefix, prefix + b"\xff" * 64):
            for row_key, row in rows:
                message_id = database.decode(kind.decode, row_key, row_key).message_id
                yield message_id, database.decode(entry.decode, row_key, row).retention_deadline


def role_of(path: str) -> str:
    """The role of the process that writes a live database."""
    return QUEUES_ROLE if path == QUEUES else messages_role(int(path.rpartition("/")[2]))


def _problem(file: str, wrong: str, lost: str, advice: str) -> Problem:
    return Problem(file=file, wrong=wrong, lost=lost, advice=advice)


def _wrong(error: CorruptStoreError, name: str) -> str:
    return str(error).removeprefix(f"{name} ")
