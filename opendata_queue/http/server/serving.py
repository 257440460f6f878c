"""Running a broker: from an open root to its last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import uvicorn
import uvloop

from odq_compactor import CompactorOptions, look_after, look_after_shard
from opendata_queue.http.auth.tokens import check_address
from opendata_queue.http.requests.connections import Connection, Connections
from opendata_queue.http.requests.exchange import Broker
from opendata_queue.http.requests.operations import ServedSystem
from opendata_queue.http.server.app import Shortcut, make_app
from opendata_queue.http.server.open_files import make_room_for
from opendata_queue.http.settings import ServerSettings
from opendata_queue.log.writer import PublishOptions
from opendata_queue.model.clock import Clock, SystemClock
from opendata_queue.model.errors import OdqError, OwnedError, StoreAccessError
from opendata_queue.root.owner_files import ALL_ROLES, QUEUES_ROLE
from opendata_queue.root.owner_watch import Vacancy, stand_by
from opendata_queue.root.roles import Role
from opendata_queue.store import Objects, StoreSettings
from opendata_queue.store.group_commit import CommitLimits
from opendata_queue.systems.engine import Engine
from opendata_queue.systems.ingest import Ingest

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2_048
_CHECK_MS: Final = 1_000
_CHECK_REQUESTS_SECONDS: Final = 0.1

Announce = Callable[[str], None]
T = TypeVar("T")


def run(
    url: str,
    settings: ServerSettings,
    *,
    announce: Announce,
    store: StoreSettings | None = None,
    options: PublishOptions | None = None,
) -> None:
    """Serve the root at ``url`` until SIGTERM or SIGINT.

    Returns when all is durable and closed; raises what made the system stop by itself.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(url, settings, announce, store, options))


async def _serve(
    url: str,
    settings: ServerSettings,
    announce: Announce,
    store: StoreSettings | None,
    options: PublishOptions | None,
) -> None:
    _check_together(settings)
    check_address(settings)
    make_room_for(settings.max_connections)
    clock = SystemClock()
    signals = _Signals()
    # The address is taken before the root: a broker that can't be reached must own nothing, and
    # a standby that could not be must say so before it is needed.
    listening = _bind(settings)
    if settings.standby:
        announce(f"standing by for {url}")
    while True:
        with listening:
            vacancy = await _unless_stopped(_vacancy(url, settings, clock, store), signals.stop)
            if vacancy is None:
                return
            _listen(listening)
            address = settings.advertise or _address(listening)
            try:
                opening = _open(url, settings, clock, vacancy, address, store, options)
                system = await _unless_stopped(opening, signals.stop)
            except OwnedError:
                if not settings.standby:
                    raise
            else:
                if system is not None:
                    await _serve_system(system, settings, clock, listening, announce, signals)
                return
        # Another process was faster: take the address again, without listening.
        listening = _bind(settings)


async def _vacancy(
    url: str, settings: ServerSettings, clock: Clock, store: StoreSettings | None
) -> bool | Vacancy:
    if not settings.standby:
        return settings.takeover
    objects = Objects.open(url, store or StoreSettings())
    return await stand_by(objects, _roles(settings), clock=clock)


def _check_together(settings: ServerSettings) -> None:
    """Refuse what does not go together, before anything is waited for."""
    if settings.role is Role.INGEST and (settings.standby or settings.takeover):
        raise StoreAccessError(
            "an ingest process takes a free shard, and no other process's place: start it without "
            "--standby and --takeover"
        )
    if settings.standby and settings.takeover:
        raise StoreAccessError(
            "a standby waits until no process serves the root, and --takeover does not wait: start "
            "it with --standby or --takeover, not both"
        )


def _roles(settings: ServerSettings) -> Sequence[str]:
    return (QUEUES_ROLE,) if settings.role is Role.QUEUES else ALL_ROLES


async def _open(
    url: str,
    settings: ServerSettings,
    clock: Clock,
    vacancy: bool | Vacancy,
    address: str | None,
    store: StoreSettings | None,
    options: PublishOptions | None = None,
) -> ServedSystem:
    limits = CommitLimits(linger_ms=settings.linger_ms)
    options = options or PublishOptions(limits=limits)
    retention = _retention(settings)
    if settings.role is Role.INGEST:
        ingest = await Ingest.open(
            url,
            settings=store,
            options=options,
            clock=clock,
            address=address,
            owner_lease_ms=settings.owner_lease_ms,
        )
        if retention is not None:
            look_after_shard(ingest, retention)
        return ingest
    engine = await Engine.open(
        url,
        settings=store,
        options=options,
        queue_limits=limits,
        clock=clock,
        takeover=vacancy,
        address=address,
        owner_lease_ms=settings.owner_lease_ms,
        publishes=settings.role is Role.ALL,
    )
    if retention is not None:
        look_after(engine, retention)
    return engine


def _retention(settings: ServerSettings) -> CompactorOptions | None:
    if not settings.retention_interval_ms:
        return None
    return CompactorOptions(
        interval_ms=settings.retention_interval_ms, erase=settings.erase_expired
    )


def run_tailer(
    url: str,
    settings: ServerSettings,
    *,
    announce: Announce,
    store: StoreSettings | None = None,
) -> None:
    """Serve the queues of the root at ``url``, without an address, until SIGTERM or SIGINT."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_tail(url, settings, announce, store))


async def _tail(
    url: str, settings: ServerSettings, announce: Announce, store: StoreSettings | None
) -> None:
    _check_together(settings)
    clock = SystemClock()
    stop = _Signals().stop
    if settings.standby:
        announce(f"standing by for {url}")
    while True:
        vacancy = await _unless_stopped(_vacancy(url, settings, clock, store), stop)
        if vacancy is None:
            return
        try:
            opening = _open(url, settings, clock, vacancy, None, store)
            engine = await _unless_stopped(opening, stop)
        except OwnedError:
            if settings.standby:
                continue  # another process was faster
            raise
        if engine is None:
            return
        break
    lost: list[OdqError] = []

    def step_down(error: OdqError) -> None:
        lost.append(error)
        stop.set()

    engine.on_lost = step_down
    try:
        announce(f"routing {url}")
        await _until_it_fails(engine, stop)
    finally:
        await _close(engine, settings)
    if lost:
        raise lost[0]


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of ``work``; if ``stop`` is set first, the work is undone, and there is none."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # it gives back what it has taken
        return None if task.cancelled() else task.result()
    finally:
        task.cancel()
        stopping.cancel()


class _Signals:
    """SIGTERM and SIGINT, from the first moment on: while it stands by and opens, too."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()
        """Set by a second signal: work that is under way is not waited for."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self.stop_now if self.stop.is_set() else self.stop).set()


async def _until_it_fails(engine: ServedSystem, stop: asyncio.Event) -> None:
    """Wait for the end; a system that can't go on says so when it is asked."""
    while not stop.is_set():
        await engine.list_queues(limit=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CHECK_MS / 1000):
                await stop.wait()


async def _serve_system(
    engine: ServedSystem,
    settings: ServerSettings,
    clock: Clock,
    listening: socket.socket,
    announce: Announce,
    signals: _Signals,
) -> None:
    broker = Broker(engine, settings, clock)
    engine.on_lost = broker.notice
    stopping: asyncio.Task[None] | None = None
    try:
        server = Server(broker)
        broker.on_failure = server.stop
        stopping = asyncio.create_task(server.stop_on_signals(signals))
        announce(f"listening on {_address(listening)}")
        await server.serve(sockets=[listening])
    finally:
        if stopping is not None:
            stopping.cancel()
        await _close(engine, settings)
    if broker.failure is not None:
        raise broker.failure


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _close(engine: ServedSystem, settings: ServerSettings) -> None:
    try:
        async with asyncio.timeout(settings.shutdown_timeout_ms / 1000):
            await engine.close()
    except TimeoutError:
        logger.error("closing took too long; all that was acknowledged is durable")
    except OdqError as error:
        logger.error("could not close the root: %s", error)


def _bind(settings: ServerSettings) -> socket.socket:
    """Take the address without listening yet: connections are refused."""
    with _listening_errors(settings.host, settings.port), contextlib.ExitStack() as undone:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        address = found[0][4][:2]
        bound = undone.enter_context(socket.socket(found[0][0], socket.SOCK_STREAM))
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            bound.bind(address)  # for us alone, even before we listen
        except OSError:
            # Perhaps only connections of an earlier process are in the way, about to end.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        undone.pop_all()
        return bound


def _listen(bound: socket.socket) -> None:
    host, port = bound.getsockname()[:2]
    with _listening_errors(host, port):
        # Our connections must not keep the address from the next process.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen(_BACKLOG)


@contextlib.contextmanager
def _listening_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreAccessError(f"can't listen on {host} port {port}: {error}") from error


def _configuration(broker: Broker, connections: Connections) -> uvicorn.Config:
    settings = broker.settings

    class Protocol(Connection):
        kept = connections

    broker.unsent_bytes = connections.unsent_bytes
    return uvicorn.Config(
        Shortcut(make_app(broker)),
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # where a request comes from is never asked
        timeout_graceful_shutdown=max(1, settings.shutdown_timeout_ms // 1000),
    )


class Server(uvicorn.Server):
    """Refuses new work from the first signal on, and ends well."""

    def __init__(self, broker: Broker) -> None:
        self.kept = Connections(broker.settings, broker.bad_requests)
        super().__init__(_configuration(broker, self.kept))
        self._broker = broker

    async def on_tick(self, counter: int) -> bool:
        self.kept.sweep_in_time(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn would raise them again when all is done."""
        yield

    async def stop_on_signals(self, signals: _Signals) -> None:
        await signals.stop.wait()
        self.stop()
        await signals.stop_now.wait()
        self.force_exit = True

    def stop(self) -> None:
        self._broker.drain()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give up the address when what was under way is done: until then, newcomers get a 503."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._broker.settings.shutdown_timeout_ms / 1000
        under_way = set(self.server_state.tasks)
        while under_way and not self.force_exit and loop.time() < deadline:
            _, under_way = await asyncio.wait(under_way, timeout=_CHECK_REQUESTS_SECONDS)
            self.kept.sweep_in_time(loop.time())
        self.config.timeout_graceful_shutdown = max(1, round(deadline - loop.time()))
        await super().shutdown(sockets)
