"""Objects that are no SlateDB database: control files and large payloads, through obstore."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import Any

import obstore
import slatedb.uniffi as slatedb
from obstore.store import LocalStore, MemoryStore, S3Store

from opendata_queue.errors import StoreAccessError, StoreUnavailableError
from opendata_queue.store.durable_files import make_folder, sync_file, sync_folders
from opendata_queue.store.location import Location, StoreKind
from opendata_queue.store.settings import StoreSettings
from opendata_queue.store.translation import translated


class Objects:
    """The object store behind a root, as both SlateDB and obstore see it."""

    __slots__ = ("_store", "location", "settings", "slatedb_store")

    def __init__(
        self,
        location: Location,
        settings: StoreSettings,
        store: LocalStore | MemoryStore | S3Store,
        slatedb_store: slatedb.ObjectStore,
    ) -> None:
        self.location = location
        self.settings = settings
        self._store = store
        self.slatedb_store = slatedb_store

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
        # Even if it was there: whoever made it may have died before syncing it.
        await self._sync(path)
        return created

    async def write(self, path: str, data: bytes) -> None:
        """Write the object ``path``, over what is there."""
        await self._put(path, data, mode="overwrite")
        await self._sync(path)

    async def read(self, path: str) -> bytes | None:
        """The bytes of ``path``; none if there is no such object."""
        with translated(f"read {self.location.url_of(path)}"):
            try:
                result = await obstore.get_async(self._store, self.location.join(path))
                return bytes(await result.bytes_async())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    async def _put(self, path: str, data: bytes, *, mode: Any) -> bool:
        with translated(f"write {self.location.url_of(path)}"):
            try:
                await obstore.put_async(self._store, self.location.join(path), data, mode=mode)
            except obstore.exceptions.AlreadyExistsError:
                return False
        return True

    async def _sync(self, path: str) -> None:
        """Make a file survive a loss of power."""
        if self.location.kind is not StoreKind.FILE or not self.settings.fsync:
            return
        root = self.location.folder
        with translated(f"sync {self.location.url_of(path)}"):
            await asyncio.to_thread(sync_file, root / path)
            await asyncio.to_thread(sync_folders, (root / path).parent, up_to=root)


def _file_clients(
    location: Location, settings: StoreSettings
) -> tuple[LocalStore, slatedb.ObjectStore]:
    make_folder(location.folder, sync=settings.fsync)
    # Rooted at the folder: object_store escapes paths, but not its root, so any name will do.
    builder = slatedb.ObjectStoreBuilder.from_env(slatedb.ObjectStoreType.LOCAL)
    builder.with_config("local_path", str(location.folder))
    return LocalStore(location.folder), builder.build()


def _s3_clients(location: Location, settings: StoreSettings) -> tuple[S3Store, slatedb.ObjectStore]:
    _check_endpoint()
    # As keywords, not as client_options: those make obstore forget AWS_ALLOW_HTTP.
    store = S3Store(
        location.bucket,
        retry_config={"retry_timeout": timedelta(milliseconds=settings.outage_timeout_ms)},
        **_timeouts(settings),  # type: ignore[arg-type]
    )
    # Not from_url, which does not look at the environment.
    builder = slatedb.ObjectStoreBuilder.from_env(slatedb.ObjectStoreType.S3)
    builder.with_url(f"s3://{location.bucket}/")
    for option, value in _timeouts(settings).items():
        builder.with_config(option, value)
    return store, builder.build()


def _check_endpoint() -> None:
    """Refuse what makes the clients panic."""
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        endpoint = os.environ.get(name)
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise StoreAccessError(f"{name} is {endpoint!r}, not a URL like http://127.0.0.1:9000")


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
