"""A queue in a PostgreSQL table, claimed with SKIP LOCKED, as PGMQ does it."""

from __future__ import annotations

import contextlib
import importlib
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.content import HEADERS
from benchmarks.compare.contract import Address, Client, Received, System, polled
from benchmarks.compare.servers import (
    HOST,
    find_program,
    free_port,
    give_to,
    lacking,
    plain_user,
    release,
    said_by,
    server,
)

_FOLDERS: Final = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS {0} (
    msg_id BIGINT PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    read_ct INT DEFAULT 0 NOT NULL,
    enqueued_at TIMESTAMPTZ DEFAULT now() NOT NULL,
    vt TIMESTAMPTZ NOT NULL,
    message BYTEA,
    headers JSONB
);
CREATE INDEX IF NOT EXISTS {0}_vt ON {0} (vt ASC);
"""
_READ: Final = """
WITH chosen AS (
    SELECT msg_id FROM {0} WHERE vt <= clock_timestamp()
    ORDER BY msg_id ASC LIMIT %s FOR UPDATE SKIP LOCKED
)
UPDATE {0} m SET vt = clock_timestamp() + interval '1 hour', read_ct = read_ct + 1
FROM chosen WHERE m.msg_id = chosen.msg_id
RETURNING m.msg_id, m.message, m.headers
"""


class PostgresClient(Client):
    """Autocommit: every statement is a transaction that is on the disk when it returns."""

    def __init__(self, connection: Any, table: str) -> None:
        self._connection = connection
        self._table = table
        self._read = _READ.format(table)
        types: Any = importlib.import_module("psycopg.types.json")
        self._headers = types.Jsonb(HEADERS)

    async def publish(self, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            self._connection.execute(
                f"INSERT INTO {self._table} (vt, message, headers)"
                " VALUES (clock_timestamp(), %s, %s)",
                [payloads[0], self._headers],
                binary=True,
            )
            return
        self._connection.execute(
            f"INSERT INTO {self._table} (vt, message, headers)"
            " SELECT clock_timestamp(), unnest(%s::bytea[]), %s",
            [list(payloads), self._headers],
            binary=True,
        )

    async def fill(self, payloads: Sequence[bytes]) -> None:
        self._connection.execute("SET synchronous_commit = off")
        await super().fill(payloads)
        self._connection.execute("RESET synchronous_commit")

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        rows = polled(lambda: self._receive_now(count), wait_ms)
        return [Received(msg_id, bytes(message), headers) for msg_id, message, headers in rows]

    def _receive_now(self, count: int) -> list[Any]:
        return list(self._connection.execute(self._read, [count], binary=True).fetchall())

    async def ack(self, handles: Sequence[Any]) -> None:
        done = self._connection.execute(
            f"DELETE FROM {self._table} WHERE msg_id = ANY(%s)", [list(handles)]
        )
        assert done.rowcount == len(handles)

    async def depth(self) -> int:
        counting = f"SELECT count(*) FROM {self._table} WHERE vt <= clock_timestamp()"
        return int(self._connection.execute(counting).fetchone()[0])


@contextlib.asynccontextmanager
async def _connect(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
    psycopg: Any = importlib.import_module("psycopg")
    table = f"q_{queue.replace('-', '_')}".lower()
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(psycopg.connect(address["conninfo"], autocommit=True))
            for _ in range(count)
        ]
        with connections[0].transaction():  # another one may make it at the same time
            connections[0].execute("SELECT pg_advisory_xact_lock(1)")
            connections[0].execute(_CREATE.format(table))
        yield [PostgresClient(connection, table) for connection in connections]


@contextlib.contextmanager
def _serve(folder: Path, relaxed: bool) -> Iterator[Address]:
    initdb, program = (find_program(name, *_FOLDERS) for name in ("initdb", "postgres"))
    folder.mkdir(parents=True, exist_ok=True)
    user = plain_user("postgres")
    give_to(user, folder)
    data = folder / "data"
    if not data.exists():
        done = subprocess.run(
            [str(initdb), "-D", str(data), "-U", "bench", "--auth=trust", "--no-sync"],
            cwd=folder,
            user=user,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            # In one line: its last one only says that it cleans up.
            raise RuntimeError(f"initdb has failed: {'; '.join(done.stderr.splitlines())}")
    port = free_port()
    conninfo = f"host={HOST} port={port} user=bench dbname=postgres"
    psycopg: Any = importlib.import_module("psycopg")

    def ready() -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(conninfo, connect_timeout=1).close()
            return True
        return False

    settings = {"shared_buffers": "256MB", "max_wal_size": "4GB"}
    command = [str(program), "-D", str(data), "-h", HOST, "-p", str(port), "-k", str(folder)]
    command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    with server(command, folder=folder, ready=ready, user=user, stop=signal.SIGINT):
        yield {"conninfo": conninfo}


def _client() -> str:
    """The library, and how it reaches libpq: (python), or compiled (binary, c)."""
    pq: Any = importlib.import_module("psycopg.pq")
    return f"{release('psycopg')} ({pq.__impl__})"


def postgres() -> System:
    program = find_program("postgres", *_FOLDERS)
    return System(
        key="postgres",
        name="PostgreSQL, SKIP LOCKED",
        serve=_serve,
        connect=_connect,
        missing=lambda: lacking(
            modules=["psycopg"],
            programs={"postgres": program, "initdb": find_program("initdb", *_FOLDERS)},
        ),
        version=lambda: f"PostgreSQL {said_by(program, '--version').split()[2]}; {_client()}",
        settings="fsync and synchronous_commit on, shared_buffers 256 MB",
        blocking=True,
    )
