"""The front door: a URL in, a system out."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from opendata_queue.api.sync import System
from opendata_queue.api.system import AsyncSystem
from opendata_queue.log.writer import PublishOptions
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError, StoreAccessError, WrongContextError
from opendata_queue.root.owner_files import DEFAULT_LEASE_MS, broker_address
from opendata_queue.root.owner_watch import Vacancy
from opendata_queue.root.roles import publishing_is_elsewhere
from opendata_queue.store import Location, Objects, StoreKind, StoreSettings
from opendata_queue.store.group_commit import CommitLimits
from opendata_queue.systems.engine import Engine
from opendata_queue.systems.read_only import ReadOnlySystem

if TYPE_CHECKING:
    from opendata_queue.http.client_options import ClientOptions

_REMOTE = ("http://", "https://")
_opened_in: int | None = None


async def open_async(
    url: str,
    *,
    settings: StoreSettings | None = None,
    options: PublishOptions | None = None,
    queue_limits: CommitLimits | None = None,
    clock: Clock | None = None,
    lease_grace_ms: int = 0,
    takeover: bool | Vacancy = False,
    address: str | None = None,
    name: str | None = None,
    owner_lease_ms: int = DEFAULT_LEASE_MS,
    read_only: bool = False,
    retention: bool = True,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
) -> AsyncSystem:
    """Open the system at ``url``, for use with ``await``.

    ``memory:///name``, ``file:///path`` and ``s3://bucket/prefix`` are opened in this process,
    which becomes their one owner; ``OwnedError`` if another process is that already. See
    ``Engine.open`` for the rest. ``http://host:port`` is the system of a broker, which may ask for
    a ``token``; what is about the store or its owner is not for it. If the broker says that another
    one does what was asked for, the token goes there only if it is on the same host, or one of
    ``hosts`` (see ``connect_async``).

    With ``read_only`` a root is only read, also while it is served: ``list_queues``, ``get_queue``,
    ``stats``, ``peek``, ``browse``, ``history``, ``failed`` and ``read`` work, a second behind at
    most; nothing is written, and what would change something raises ``WrongContextError``.

    To use a root that a broker serves, without its URL, see ``connect_async``.

    With ``retention`` what is past its time is removed in the background, once a minute.
    """
    if _is_remote(url):
        _check_remote(
            settings=settings,
            options=options,
            queue_limits=queue_limits,
            lease_grace_ms=lease_grace_ms or None,
            takeover=takeover or None,
            address=address,
            name=name,
            read_only=read_only or None,
        )
        return await _connect(url, _client_options(url, token, hosts), clock)
    if token is not None or hosts is not None:
        what = "a token is" if token is not None else "hosts are"
        raise InvalidInputError(f"{what} for a broker, and {url!r} is none")
    _check_process()
    if read_only:
        return await _look_at(
            url, settings, clock, options=options, takeover=takeover, address=address, name=name
        )
    engine = await Engine.open(
        url,
        settings=settings,
        options=options,
        queue_limits=queue_limits,
        clock=clock,
        lease_grace_ms=lease_grace_ms,
        takeover=takeover,
        address=address,
        name=name,
        owner_lease_ms=owner_lease_ms,
    )
    if retention:
        # Here, since it imports what this module makes known.
        from odq_compactor import look_after

        look_after(engine)
    return engine


def open(
    url: str,
    *,
    settings: StoreSettings | None = None,
    options: PublishOptions | None = None,
    queue_limits: CommitLimits | None = None,
    clock: Clock | None = None,
    lease_grace_ms: int = 0,
    takeover: bool | Vacancy = False,
    address: str | None = None,
    name: str | None = None,
    owner_lease_ms: int = DEFAULT_LEASE_MS,
    read_only: bool = False,
    retention: bool = True,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    timeout_ms: int | None = None,
) -> System:
    """Open the system at ``url``, for code that blocks. See ``open_async``."""
    return System.opened_by(
        lambda: open_async(
            url,
            settings=settings,
            options=options,
            queue_limits=queue_limits,
            clock=clock,
            lease_grace_ms=lease_grace_ms,
            takeover=takeover,
            address=address,
            name=name,
            owner_lease_ms=owner_lease_ms,
            read_only=read_only,
            retention=retention,
            token=token,
            hosts=hosts,
        ),
        timeout_ms,
    )


async def connect_async(
    url: str,
    *,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    options: ClientOptions | None = None,
    settings: StoreSettings | None = None,
    clock: Clock | None = None,
) -> AsyncSystem:
    """Connect to the broker that serves the root at ``url``, for use with ``await``.

    ``file:///path`` or ``s3://bucket/prefix``: the store says where it is served, and when another
    broker takes over, it is followed. Nothing is owned here, and nothing is made. If no broker
    serves the root, it is a ``StoreUnavailableError``. A broker's own URL does as well.

    A file in the store says where that is, and who can write to the store can write one. So a
    ``token`` is sent to this machine, and to ``hosts``: names, ``*.domain``, addresses, networks
    (``10.0.0.0/8``), or ``*`` for any; ``https://`` before one means only by TLS. A client that has
    come by https never goes on by http.

    ``options`` are of the client (``opendata_queue.client.ClientOptions``), ``settings`` of the
    store.
    """
    options = _client_options(url, token, hosts, options)
    if _is_remote(url):
        _check_remote(settings=settings)
        return await _connect(url, options, clock)
    location = Location.parse(url)
    if location.kind is StoreKind.FILE and not location.folder.is_dir():
        raise StoreAccessError(f"there is no root at {url}: make one with `odq init {url}`")
    objects = Objects.open(url, settings or StoreSettings())

    async def find() -> str | None:
        address = await broker_address(objects)
        return address or (await publishing_is_elsewhere(objects)).address

    return await _connect(url, options, clock, find)


def connect(
    url: str,
    *,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    options: ClientOptions | None = None,
    settings: StoreSettings | None = None,
    clock: Clock | None = None,
    timeout_ms: int | None = None,
) -> System:
    """Connect to the broker that serves a root, for code that blocks. See ``connect_async``."""
    return System.opened_by(
        lambda: connect_async(
            url, token=token, hosts=hosts, options=options, settings=settings, clock=clock
        ),
        timeout_ms,
    )


def _is_remote(url: str) -> bool:
    """Whether it is a broker's. What is no text is none, and is refused like any other root."""
    return isinstance(url, str) and url.startswith(_REMOTE)


async def _look_at(
    url: str, settings: StoreSettings | None, clock: Clock | None, **for_owners: object
) -> AsyncSystem:
    for what, value in for_owners.items():
        if value:
            raise InvalidInputError(f"{what} is for owners, and can't be given with read_only")
    return await ReadOnlySystem.open(url, settings=settings, clock=clock)


async def _connect(
    url: str,
    options: ClientOptions,
    clock: Clock | None,
    find: Callable[[], Awaitable[str | None]] | None = None,
) -> AsyncSystem:
    from opendata_queue.http.client import RemoteSystem

    return await RemoteSystem.open(url, options=options, clock=clock, find=find)


def _client_options(
    url: str,
    token: str | None,
    hosts: Sequence[str] | None,
    options: ClientOptions | None = None,
) -> ClientOptions:
    try:
        import opendata_queue.http.client  # noqa: F401  # before anything is asked of the store
        from opendata_queue.http.client_options import ClientOptions
    except ImportError as error:
        raise StoreAccessError(f"{error}: install opendata-queue[client] to reach {url}") from error
    options = options or ClientOptions()
    if token is not None:
        options = replace(options, token=token)
    return options if hosts is None else replace(options, hosts=hosts)


def _check_remote(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidInputError(f"{name} is for a root, and can't be given for a broker")


def _check_process() -> None:
    """Refuse a fork of a process that has opened something: the store's threads are not in it."""
    global _opened_in
    if _opened_in not in (None, os.getpid()):
        raise WrongContextError(
            f"process {_opened_in} opened a system before it forked this one, {os.getpid()}, where "
            "the store can't work: fork before the first open, or start processes with 'spawn'"
        )
    _opened_in = os.getpid()
