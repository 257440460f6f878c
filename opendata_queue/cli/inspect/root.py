"""``odq inspect`` of a root: its rows, by key, by queue and by message."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from odq_encodings import EncodingError, inspect_row, row_kind
from opendata_queue.cli.common import (
    FAILED,
    NOTHING_THERE,
    AsJson,
    QueueName,
    RootStore,
    complain,
    note,
    plural,
    print_json,
    print_table,
    run,
    url_of,
)
from opendata_queue.cli.inspect.live_rows import (
    QUEUES,
    LiveRow,
    live_root,
    rows_of_message,
    rows_of_queue,
)
from opendata_queue.cli.inspect.rows import (
    HexKey,
    ShowAll,
    app,
    bytes_of,
    inspection_as_json,
    print_inspection,
)
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.paths import messages_path

__all__ = ["app"]

_MAX_ID = (1 << 64) - 1

Limit = Annotated[
    int,
    typer.Option("--limit", "-n", min=1, max=10_000, help="Of each kind, so many rows at most."),
]
Shard = Annotated[
    int, typer.Option(min=0, max=99_999, help="Which messages database, where it matters.")
]


@app.command("row")
def inspect_live_row(
    key: HexKey,
    shard: Shard = 0,
    store: RootStore = None,
    as_json: AsJson = False,
    show_all: ShowAll = False,
) -> None:
    """Read the row with a key from a root, and decode it.

    The root may be in use: its owner is not disturbed. Exits with 3 if there is no such row.

    Example: odq inspect row 0106656d61696c730000 --store file:///var/lib/queues
    """
    wanted = bytes_of(key, "KEY")

    async def read() -> list[LiveRow]:
        async with live_root(url_of(store)) as root:
            rows = await root.get(QUEUES, [wanted])
            return rows + await root.get(messages_path(shard), [wanted])

    _show(run(read()), as_json, show_all)


@app.command("rows")
def list_live_rows(
    database: Annotated[str, typer.Argument(metavar="DATABASE", help="queues or messages.")],
    prefix: Annotated[str, typer.Option(metavar="HEX", help="What their keys begin with.")] = "",
    limit: Limit = 100,
    shard: Shard = 0,
    store: RootStore = None,
    as_json: AsJson = False,
) -> None:
    """List the rows of a database of a root, in the order of their keys.

    Example: odq inspect rows queues --prefix 010b --store file:///var/lib/queues
    """
    paths = {"queues": QUEUES, "messages": messages_path(shard)}
    if database not in paths:
        raise InvalidInputError(f"{database!r} is no database; there are queues and messages")

    async def read() -> list[LiveRow]:
        async with live_root(url_of(store)) as root:
            return await root.scan(paths[database], bytes_of(prefix, "--prefix"), limit)

    rows = run(read())
    if as_json:
        print_json(
            [
                {"key": row.key.hex(), "kind": _title(row.key), "value": row.value.hex()}
                for row in rows
            ]
        )
        return
    print_table(
        ("key", "kind", "bytes"), [(row.key.hex(), _title(row.key), len(row.value)) for row in rows]
    )
    if len(rows) == limit:
        note(f"there may be more than these {plural(limit, 'row')}: --limit")


@app.command("queue")
def inspect_live_queue(
    queue: QueueName,
    limit: Limit = 10,
    store: RootStore = None,
    as_json: AsJson = False,
    show_all: ShowAll = False,
) -> None:
    """Read all that a root holds of a queue, and decode it.

    The root may be in use: its owner is not disturbed.

    Example: odq inspect queue emails --store s3://bucket/prefix
    """

    async def read() -> list[LiveRow]:
        async with live_root(url_of(store)) as root:
            return await rows_of_queue(root, queue, limit)

    _show(run(read()), as_json, show_all)


@app.command("message")
def inspect_live_message(
    message_id: Annotated[
        int, typer.Argument(metavar="ID", min=0, max=_MAX_ID, help="The message's id.")
    ],
    store: RootStore = None,
    as_json: AsJson = False,
    show_all: ShowAll = False,
) -> None:
    """Read the rows of a message from a root, and decode them: log entry, payload, attempts.

    The root may be in use: its owner is not disturbed. Exits with 3 if there is no such message.

    Example: odq inspect message 4711 --store file:///var/lib/queues
    """

    async def read() -> list[LiveRow]:
        async with live_root(url_of(store)) as root:
            return await rows_of_message(root, message_id)

    _show(run(read()), as_json, show_all)


def _show(rows: list[LiveRow], as_json: bool, show_all: bool) -> None:
    if not rows:
        complain("there is no such row")
        raise typer.Exit(NOTHING_THERE)
    inspected = [(row, inspect_row(row.key, row.value)) for row in rows]
    if as_json:
        print_json(
            [
                {
                    "database": row.database,
                    "key": row.key.hex(),
                    "kind": _title(row.key),
                    "records": [inspection_as_json(one) for one in inspections],
                }
                for row, inspections in inspected
            ]
        )
    else:
        console = Console()
        for row, inspections in inspected:
            typer.echo(f"{row.database}  {_title(row.key)}  {row.key.hex()}")
            for inspection in inspections:
                print_inspection(console, inspection, show_all)
            typer.echo()
    if any(one.error for _, inspections in inspected for one in inspections):
        raise typer.Exit(FAILED)


def _title(key: bytes) -> str:
    try:
        return row_kind(key).title
    except EncodingError:
        return "unknown"
