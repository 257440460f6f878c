"""Objects that are no SlateDB database: control files and large payloads, through obstore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import obstore
import slatedb.uniffi as slatedb
from obstore.store import LocalStore, MemoryStore, S3Store

from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.model.figures import Figure
from opendata_queue.store.errors import is_missing_bucket, translated
from opendata_queue.store.files.durable import make_folder, sync_file, sync_folders
from opendata_queue.store.files.local import (
    delete_file,
    delete_under,
    files_in,
    files_under,
    folders_in,
    put_file,
)
from opendata_queue.store.location import JOURNAL_SUFFIX, Location, StoreKind
from opendata_queue.store.objects.abilities import (
    LOCAL,
    OUTCOME_PATH,
    Abilities,
    outcome,
    probe,
    remembered,
)
from opendata_queue.store.objects.s3 import S3Access
from opendata_queue.store.settings import StoreSettings
from opendata_queue.store.waiting import timeout_figures

_T = TypeVar("_T")

# For how long a caller that is cancelled waits for the answer that is on its way.
_LAST_WAIT_SECONDS = 1.0

# obstore's own ten are used up after a second or a few, however long an outage may last.
_UNLIMITED_RETRIES = 1 << 20
# A process that is killed during an upload in parts leaves them in the bucket, where no listing
# shows them. One request leaves nothing, but must be done within the time that a request has.
_LARGEST_SINGLE_PUT_BYTES = 64 * 1024 * 1024
# After an outage a heartbeat must not come much later than a standby's poll.
_LONGEST_PAUSE = timedelta(seconds=1)


class Objects:
    """The object store behind a root, as both SlateDB and obstore see it."""

    __slots__ = (
        "_abilities",
        "_first",
        "_store",
        "location",
        "requests",
        "settings",
        "slatedb_store",
    )

    def __init__(
        self,
        location: Location,
        settings: StoreSettings,
        store: LocalStore | MemoryStore | S3Store,
        slatedb_store: slatedb.ObjectStore,
        first: S3Store | None = None,
    ) -> None:
        self.location = location
        self.settings = settings
        self._store = store
        self._first = first
        """Asks until there was an answer, and gives up after seconds: who has mistyped an endpoint
        must not wait for as long as an outage may last."""
        self.slatedb_store = slatedb_store
        self.requests = 0
        """How many were made here; SlateDB counts its own."""
        self._abilities: Abilities | None = LOCAL.get(location.kind)

    @classmethod
    def open(cls, url: str, settings: StoreSettings) -> Objects:
        """Make the clients for ``url``. On S3 nothing is sent yet."""
        location = Location.parse(url)
        with translated(f"open {location}"):
            if location.kind is StoreKind.S3:
                return cls(location, settings, *_s3_clients(location, settings))
            if location.kind is StoreKind.FILE:
                return cls(location, settings, *_file_clients(location, settings))
        return cls(location, settings, *_memory_clients(location))

    async def create(self, path: str, data: bytes) -> bool:
        """Create the object ``path``; false if it is there already, which is left as it is.

        Of any number of processes that try, exactly one gets true. A put whose answer was lost is
        settled by reading the object back, so ``data`` must be something that no other process
        would write.
        """
        try:
            created = await self._put(path, data, mode="create")
        except StoreUnavailableError:
            found = await self.read(path)
            if found is None:
                raise
            created = found == data
        else:
            created = created or await self.read(path) == data
        # Even if it was there: the process that made it may have died before syncing it.
        await self._sync(path)
        return created

    async def write(self, path: str, data: bytes, *, sync: bool = True) -> None:
        """Write the object ``path``, over what is there.

        Without ``sync`` a file may be lost with the power.
        """
        await self._put(path, data, mode="overwrite", sync=sync)
        if sync:
            await self._sync(path)

    async def read(
        self, path: str, *, fits: Callable[[int], Awaitable[bool]] | None = None
    ) -> bytes | None:
        """The bytes of ``path``; none if there is no such object.

        ``fits`` is given its size before it is read; none if it says no.
        """
        with translated(f"read {self.location.url_of(path)}"):
            self.requests += 1
            try:
                path = self.location.join(path)
                result = await _answer(obstore.get_async(self._first or self._store, path))
                self._first = None
                if fits is not None and not await fits(result.meta["size"]):
                    return None
                return bytes(await _answer(result.bytes_async()))
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                self._first = None
                return None

    async def read_tagged(self, path: str) -> tuple[bytes, str | None] | None:
        """The bytes of ``path`` and the ETag of this version; none if there is no such object."""
        found = await self._read_described(path)
        return None if found is None else (found[0], found[1]["e_tag"])

    async def read_dated(self, path: str) -> tuple[bytes, int] | None:
        """The bytes of ``path``, and when it was last written; none if there is no such object.

        That is in milliseconds by the store's clock. S3 says the second; of files, it is the
        machine's clock.
        """
        found = await self._read_described(path)
        return None if found is None else (found[0], _modified_ms(found[1]))

    async def _read_described(self, path: str) -> tuple[bytes, obstore.ObjectMeta] | None:
        with translated(f"read {self.location.url_of(path)}"):
            self.requests += 1
            try:
                result = await _answer(obstore.get_async(self._store, self.location.join(path)))
                return bytes(await _answer(result.bytes_async())), result.meta
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                return None

    async def read_range(self, path: str, start: int, end: int) -> bytes | None:
        """The bytes from ``start`` up to, not including, ``end``; none if there is no object."""
        with translated(f"read {self.location.url_of(path)}"):
            self.requests += 1
            path = self.location.join(path)
            try:
                reading = obstore.get_range_async(self._store, path, start=start, end=end)
                return bytes(await _answer(reading))
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                return None

    async def replace_tagged(self, path: str, data: bytes, tag: str, *, quoted: bool) -> bool:
        """Overwrite the version of ``path`` that has this ETag; false if it is another one.

        There are stores that take an ETag only without the quotes that belong to it.
        """
        tag = tag if quoted else tag.removeprefix('"').removesuffix('"')
        with translated(f"write {self.location.url_of(path)}"):
            self.requests += 1
            path = self.location.join(path)
            try:
                await _answer(obstore.put_async(self._store, path, data, mode={"e_tag": tag}))
            except obstore.exceptions.PreconditionError:
                return False
        return True

    async def abilities(self) -> Abilities:
        """What the store can do: on S3 as the root remembers it, or else found out now."""
        if self._abilities is None:
            place = self._place()
            found = remembered(await self.read(OUTCOME_PATH), place, SystemClock().now_ms())
            if found is None:
                return await self.probe()
            self._abilities = found
        return self._abilities

    async def probe(self) -> Abilities:
        """Find out what the store can do; on S3 the root remembers it."""
        found = await probe(self)
        if self.location.kind is StoreKind.S3:
            self._abilities = found
            if not found.missing:
                now_ms = SystemClock().now_ms()
                await self.write(OUTCOME_PATH, outcome(found, self._place(), now_ms))
        return found

    def _place(self) -> str:
        """Where the store is, by which a root knows that what it remembers is about this one."""
        return f"{S3Access.from_environment().endpoint or 'Amazon S3'}, {self.location.bucket}"

    async def modified(self, folder: str) -> list[tuple[str, int]]:
        """The names of the objects right in ``folder``, and when they were written; for small ones.

        By the store's clock, in milliseconds.
        """
        with translated(f"list {self.location.url_of(folder)}"):
            self.requests += 1
            prefix = self.location.join(folder)
            found = await _answer(obstore.list_with_delimiter_async(self._store, prefix))
            return [(one["path"].rpartition("/")[2], _modified_ms(one)) for one in found["objects"]]

    async def names(self, folder: str) -> list[str]:
        """The names of the objects right in ``folder``, in their order; for small folders."""
        with translated(f"list {self.location.url_of(folder)}"):
            self.requests += 1
            if self.location.kind is StoreKind.FILE:
                listed = await asyncio.to_thread(list, files_in(self.location.folder / folder))
                return sorted(name for name, _ in listed)
            prefix = self.location.join(folder)
            store = self._first or self._store
            found = await _answer(obstore.list_with_delimiter_async(store, prefix))
            self._first = None
            return sorted(one["path"].rpartition("/")[2] for one in found["objects"])

    async def folders(self, folder: str) -> list[str]:
        """The names of the folders right in ``folder``, in their order; for small folders."""
        with translated(f"list {self.location.url_of(folder)}"):
            self.requests += 1
            if self.location.kind is StoreKind.FILE:
                place = self.location.folder / folder
                return sorted(await asyncio.to_thread(list, folders_in(place)))
            prefix = self.location.join(folder) or None
            found = await _answer(obstore.list_with_delimiter_async(self._store, prefix))
            return sorted(one.rstrip("/").rpartition("/")[2] for one in found["common_prefixes"])

    async def names_after(self, folder: str, after: str, limit: int) -> list[str]:
        """The next names in ``folder`` that come after a name, in their order; for large folders.

        On S3 this costs a request for each thousand names that are returned, not that are there.
        """
        return [name for name, _ in await self.list_from(folder, after, limit)]

    async def list_from(self, folder: str, after: str, limit: int) -> list[tuple[str, int]]:
        """The next objects right in ``folder`` after a name, in their order, and their sizes."""
        if self.location.kind is StoreKind.FILE:
            with translated(f"list {self.location.url_of(folder)}"):
                self.requests += 1
                listed = await asyncio.to_thread(list, files_in(self.location.folder / folder))
                return sorted(one for one in listed if one[0] > after)[:limit]
        prefix = self.location.join(folder)
        offset = f"{prefix}/{after}" if after else None
        found: list[tuple[str, int]] = []
        with translated(f"list {self.location.url_of(folder)}"):
            listing = obstore.list(self._store, prefix, offset=offset, chunk_size=min(limit, 1_000))
            async for chunk in _chunks(listing):
                self.requests += 1
                listed = [(one["path"].removeprefix(f"{prefix}/"), one["size"]) for one in chunk]
                found += [one for one in listed if "/" not in one[0]]
                if self.location.kind is StoreKind.S3 and len(found) >= limit:
                    break
        return sorted(found)[:limit]

    async def list_with_times(self, folder: str, limit: int) -> list[tuple[str, int, int]]:
        """Some objects right in ``folder``: names, sizes, and when they were written."""
        prefix = self.location.join(folder)
        with translated(f"list {self.location.url_of(folder)}"):
            listing = obstore.list(self._store, prefix, chunk_size=limit)
            async for chunk in _chunks(listing):
                self.requests += 1
                return [
                    (one["path"].rpartition("/")[2], one["size"], _modified_ms(one))
                    for one in chunk
                ]
        return []

    async def size_bytes(self, folder: str = "") -> int:
        """The bytes of all objects under ``folder``, as the bucket counts them.

        Without journals (RFC 0011): the caller's own may be most of a small root.
        """
        size_bytes = 0
        with translated(f"list {self.location.url_of(folder)}"):
            if self.location.kind is StoreKind.FILE:
                self.requests += 1
                files = await asyncio.to_thread(list, files_under(self.location.folder / folder))
                return sum(size for name, size in files if not name.endswith(JOURNAL_SUFFIX))
            listing = obstore.list(self._store, self.location.join(folder) or None)
            async for chunk in _chunks(listing):
                self.requests += 1
                size_bytes += sum(
                    one["size"] for one in chunk if not one["path"].endswith(JOURNAL_SUFFIX)
                )
        return size_bytes

    async def size_of(self, path: str) -> int:
        """The bytes of one object; 0 if there is none."""
        with translated(f"read {self.location.url_of(path)}"):
            self.requests += 1
            try:
                path = self.location.join(path)
                return (await _answer(obstore.head_async(self._store, path)))["size"]
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                return 0

    async def delete_under(self, folder: str) -> int:
        """Delete all objects under ``folder``, many with one request where the store can.

        Returns how many bytes they had. Of files the empty folders go, too, and links, but nothing
        that these lead to.
        """
        prefix = self.location.join(folder)
        size_bytes = 0
        with translated(f"delete {self.location.url_of(folder)}"):
            if self.location.kind is StoreKind.FILE:
                self.requests += 1
                return await asyncio.to_thread(delete_under, self.location.folder, folder)
            async for chunk in _chunks(obstore.list(self._store, prefix)):
                self.requests += 2
                paths = [one["path"] for one in chunk]
                await _answer(obstore.delete_async(self._store, paths))
                size_bytes += sum(one["size"] for one in chunk)
        return size_bytes

    async def delete(self, path: str) -> None:
        """Delete the object ``path``; nothing happens if there is none."""
        with translated(f"delete {self.location.url_of(path)}"):
            self.requests += 1
            if self.location.kind is StoreKind.FILE:
                await asyncio.to_thread(delete_file, self.location.folder, path)
                return
            try:
                await _answer(obstore.delete_async(self._store, self.location.join(path)))
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise

    def figures(self) -> Iterator[Figure]:
        """What was asked of the store for control files and large payloads."""
        yield Figure(
            name="odq_object_requests",
            help="Requests for control files and large payloads; SlateDB counts its own.",
            kind="counter",
            value=self.requests,
        )
        yield from timeout_figures()

    async def _put(self, path: str, data: bytes, *, mode: Any, sync: bool = True) -> bool:
        with translated(f"write {self.location.url_of(path)}"):
            self.requests += 1
            if self.location.kind is StoreKind.FILE:
                sync = sync and self.settings.fsync
                put = partial(put_file, create=mode == "create", sync=sync)
                return await _answer(asyncio.to_thread(put, self.location.folder, path, data))
            try:
                path = self.location.join(path)
                in_parts = len(data) > _LARGEST_SINGLE_PUT_BYTES
                store = self._first or self._store
                await _answer(
                    obstore.put_async(store, path, data, mode=mode, use_multipart=in_parts)
                )
            except obstore.exceptions.AlreadyExistsError:
                self._first = None
                return False
        self._first = None
        return True

    async def _sync(self, path: str) -> None:
        """Make a file survive a loss of power."""
        if self.location.kind is not StoreKind.FILE or not self.settings.fsync:
            return
        root = self.location.folder
        with translated(f"sync {self.location.url_of(path)}"):
            await asyncio.to_thread(sync_file, root / path)
            await asyncio.to_thread(sync_folders, (root / path).parent, up_to=root)


async def _answer(request: Awaitable[_T]) -> _T:
    """The answer to a request. A caller that is cancelled still waits for it, for a moment.

    A request that is dropped is ended by a thread of obstore's, through the interpreter, at some
    later time. If the process is at its end the interpreter may be gone by then, and the thread
    panics, on standard error.
    """
    answer = asyncio.ensure_future(request)
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        try:
            await asyncio.wait([answer], timeout=_LAST_WAIT_SECONDS)
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # retrieved, so that asyncio logs nothing about it
        raise


def _modified_ms(found: Any) -> int:
    return int(found["last_modified"].timestamp() * 1000)


async def _chunks(listing: Any) -> AsyncIterator[Any]:
    chunks = aiter(listing)
    while True:
        try:
            chunk = await _answer(anext(chunks))
        except StopAsyncIteration:
            return
        yield chunk


def _file_clients(
    location: Location, settings: StoreSettings
) -> tuple[LocalStore, slatedb.ObjectStore]:
    make_folder(location.folder, sync=settings.fsync, mode=0o700)
    # Rooted at the folder: object_store escapes paths, but not its root, so any name will do.
    builder = slatedb.ObjectStoreBuilder.from_env(slatedb.ObjectStoreType.LOCAL)
    builder.with_config("local_path", str(location.folder))
    return LocalStore(location.folder), builder.build()


def _s3_clients(
    location: Location, settings: StoreSettings
) -> tuple[S3Store, slatedb.ObjectStore, S3Store]:
    access = S3Access.from_environment()
    options = access.options(location.bucket) | _timeouts(settings)
    given: dict[str, Any] = dict(options)
    if access.endpoint is not None:
        given["aws_endpoint_url_s3"] = access.endpoint_for(location.bucket)
    retries: Any = {"retry_timeout": timedelta(milliseconds=settings.outage_timeout_ms)}
    for_ever = {"backoff": {"max_backoff": _LONGEST_PAUSE}, "max_retries": _UNLIMITED_RETRIES}
    with access.trusted():
        # As keywords, not as client_options: those make obstore forget all other settings.
        first = S3Store(location.bucket, retry_config=retries, **given)
        store = S3Store(location.bucket, retry_config=retries | for_ever, **given)
        # Not from_url, which does not read the environment.
        builder = slatedb.ObjectStoreBuilder.from_env(slatedb.ObjectStoreType.S3)
        builder.with_url(f"s3://{location.bucket}/")
        for option, value in options.items():
            builder.with_config(option, value)
        return store, builder.build(), first


def _timeouts(settings: StoreSettings) -> dict[str, str]:
    longest = f"{settings.request_timeout_ms}ms"
    return {"timeout": longest, "connect_timeout": longest}


# A memory root lives as long as the process, so that it can be closed and opened again.
_memory_roots: dict[str, tuple[MemoryStore, slatedb.ObjectStore]] = {}


def _memory_clients(location: Location) -> tuple[MemoryStore, slatedb.ObjectStore]:
    if not location.path:  # `memory:///` has no name to be found by: each one is new
        return MemoryStore(), slatedb.ObjectStore.resolve("memory:///")
    if location.path not in _memory_roots:
        _memory_roots[location.path] = MemoryStore(), slatedb.ObjectStore.resolve("memory:///")
    return _memory_roots[location.path]


def forget_memory_root(url: str) -> None:
    """Let go of a named ``memory:///`` root and all that is in it."""
    _memory_roots.pop(Location.parse(url).path, None)
