"""``odq messages``: show messages, without claiming any."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from opendata_queue.cli.common import (
    NOTHING_THERE,
    AsJson,
    QueueName,
    Store,
    Token,
    as_json_value,
    complain,
    moment_ms,
    note,
    print_fields,
    print_json,
    print_table,
    read_only_at,
    retention_text,
    safe_text,
    shortened,
    time_text,
    write_out,
)
from opendata_queue.cli.json_messages import message_as_json
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.messages import PeekedMessage, StoredMessage
from opendata_queue.model.values import BrowsedState, FoundEntry, MessageHistory, QueueEntry

app = typer.Typer(help="Show messages, without claiming any.", no_args_is_help=True)

_PAGE = 1_000
_SHOWN_BYTES = 4_096


class State(enum.StrEnum):
    AVAILABLE = "available"
    DELAYED = "delayed"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    FAILED = "failed"


@app.command("get")
def get_message(
    message_id: Annotated[int, typer.Argument(metavar="ID", help="The message's id.")],
    payload_only: Annotated[
        bool, typer.Option("--payload", help="Print the bytes of the payload and nothing else.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the payload to a file.")
    ] = None,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show a message: headers, payload, where it is in every queue, and who has claimed it.

    Exits with 3 if there is no such message, or its retention is over.

    Examples:
      odq messages get 4711
      odq messages get 4711 --payload > photo.jpg
    """
    with read_only_at(store, token) as system:
        message = system.read(message_id)
        history = system.history(message_id) if message is not None else None
    if message is None or history is None:
        complain(f"there is no message {message_id}")
        raise typer.Exit(NOTHING_THERE)
    if output is not None:
        output.write_bytes(_payload(message))
    elif payload_only:
        write_out(_payload(message))
    elif as_json:
        print_json(message_as_json(message) | _history_as_json(history))
    else:
        _print_message(message, history)


@app.command("peek")
def peek(
    queue: QueueName,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1_000)] = 1,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show the next messages of a queue in the order of claiming. They stay where they are.

    With --json a line for each. Exits with 3 if none is available.

    Example: odq messages peek emails --count 5
    """
    with read_only_at(store, token) as system:
        messages = system.peek(queue, count)
    if as_json:
        for message in messages:
            print_json(message_as_json(message), line=True)
    elif messages:
        columns = ("id", "priority", "attempts", "received at", "headers", "payload")
        print_table(columns, [_peeked_cells(message) for message in messages])
    if not messages:
        raise typer.Exit(NOTHING_THERE)


@app.command("browse")
def browse(
    queue: QueueName,
    state: Annotated[State, typer.Argument(metavar="STATE", help=", ".join(State))],
    after: Annotated[
        str | None, typer.Option(metavar="NEXT", help="Go on where the page before has ended.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=_PAGE, help="How long a page is.")
    ] = 100,
    every: Annotated[bool, typer.Option("--all", help="Page after page, to the end.")] = False,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List the messages of a queue that are in one state.

    With --json a page is {"entries": [], "next": …}, whose next is for --after; with --all there
    is a line for each entry.

    Examples:
      odq messages browse emails in_flight
      odq messages browse emails done --all --json
    """
    if every and after is not None:
        raise InvalidInputError("--all begins at the beginning: it excludes --after")
    wanted: BrowsedState = state.value
    with read_only_at(store, token) as system:
        page = system.browse(queue, wanted, after=after, limit=_PAGE if every else limit)
        entries = page.entries
        while every:
            _print_entries(entries, state, as_json)
            if page.next is None:
                return
            page = system.browse(queue, wanted, after=page.next, limit=_PAGE)
            entries = page.entries
    if as_json:
        print_json({"entries": [_entry_as_json(one) for one in entries], "next": page.next})
        return
    _print_entries(entries, state, as_json=False)
    if page.next is not None:
        note(f"there is more: --after {page.next}")


@app.command("find")
def find(
    queue: QueueName,
    state: Annotated[
        State, typer.Option(metavar="STATE", help=f"Where they are: {', '.join(State)}.")
    ] = State.FAILED,
    filter: Annotated[
        str | None,
        typer.Option("--filter", metavar="EXPR", help="Those whose headers satisfy a filter."),
    ] = None,
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Failed ones whose error has this text.")
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Those that it has in flight, or failed with."),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option(
            metavar="WHEN",
            parser=moment_ms,
            help="Visible, claimed or finished then or later: a time in ms since 1970, or a "
            "duration, like 2h, for the last two hours.",
        ),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(metavar="WHEN", parser=moment_ms, help="The same, before that time."),
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="NEXT", help="Go on where the search before has ended.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=_PAGE, help="How many to find.")
    ] = 100,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Find the messages of a queue that are in one state and satisfy conditions.

    It goes on until it has found --limit of them, or has seen all. With --json it prints
    {"entries": [], "next": …, "examined": …}, whose next is for --after. Exits with 3 if there
    are none.

    Examples:
      odq messages find emails --error timeout --since 1h
      odq messages find emails --state in_flight --consumer worker-7
      odq messages find emails --state done --filter "type = 'order.created'" --json
    """
    entries: list[FoundEntry] = []
    examined = 0
    with read_only_at(store, token) as system:
        while True:
            page = system.find(
                queue,
                state.value,
                filter=filter,
                error=error,
                consumer=consumer,
                since_ms=since,
                until_ms=until,
                after=after,
                limit=limit - len(entries),
            )
            entries += page.entries
            examined += page.examined
            after = page.next
            if after is None or len(entries) == limit:
                break
    if as_json:
        shown = [_entry_as_json(one) for one in entries]
        print_json({"entries": shown, "next": after, "examined": examined})
    elif entries:
        _print_entries(entries, state, as_json=False)
        if after is not None:
            note(f"there may be more: --after {after}")
    if not entries:
        raise typer.Exit(NOTHING_THERE)


def _payload(message: StoredMessage) -> bytes:
    if message.payload is None:
        raise InvalidInputError(
            f"message {message.message_id} has no payload here, but a URI: {message.payload_uri}"
        )
    return message.payload


# --- as JSON --------------------------------------------------------------------------------------


def _history_as_json(history: MessageHistory) -> dict[str, Any]:
    return {
        "consumers": list(history.consumers),
        "queues": [_entry_as_json(entry) for entry in history.entries],
        "queues_left_out": history.queues_left_out,
    }


def _entry_as_json(entry: QueueEntry) -> dict[str, Any]:
    """What an entry has; what its state does not have is left out."""
    fields: dict[str, Any] = as_json_value(entry)
    return {name: value for name, value in fields.items() if value is not None}


# --- for people -----------------------------------------------------------------------------------


def _print_message(message: StoredMessage, history: MessageHistory) -> None:
    delayed = message.visible_at_ms > message.received_at_ms
    print_fields(
        [
            ("message", message.message_id),
            ("created at", time_text(message.created_at_ms)),
            ("received at", time_text(message.received_at_ms)),
            ("visible at", time_text(message.visible_at_ms) if delayed else None),
            ("retention", retention_text(message.retention_seconds)),
            *((f"header {name}", safe_text(value.encode())) for name, value in message.headers),
            ("payload URI", message.payload_uri if message.payload is None else None),
            ("claimed by", ", ".join(history.consumers) or "no consumer"),
            *((f"queue {entry.queue}", _whereabouts(entry)) for entry in history.entries),
        ]
    )
    if history.queues_left_out:
        typer.echo(f"and {history.queues_left_out} queues that were not checked")
    if message.payload is not None:
        shown = message.payload[:_SHOWN_BYTES]
        typer.echo(f"\n{safe_text(shown)}")
        if len(shown) < len(message.payload):
            typer.echo(f"… ({len(message.payload):,} bytes; --payload prints them all)")


def _whereabouts(entry: QueueEntry) -> str:
    since = {
        "in_flight": f", claimed at {time_text(entry.claimed_at_ms)} by {entry.consumer or '?'} "
        f"until {time_text(entry.lease_deadline_ms)}",
        "delayed": f" until {time_text(entry.visible_at_ms)}",
        "done": f" at {time_text(entry.finished_at_ms)}",
        "failed": f" at {time_text(entry.finished_at_ms)}: {shortened(entry.error or '')}",
    }.get(entry.state, "")
    attempts = "" if entry.attempts is None else f" (attempts: {entry.attempts})"
    return f"{entry.state}{since}{attempts}"


def _peeked_cells(message: PeekedMessage) -> list[object]:
    payload = message.payload_uri if message.payload is None else safe_text(message.payload[:200])
    return [
        message.message_id,
        message.priority,
        message.attempts,
        time_text(message.received_at_ms),
        _headers_text(message.headers),
        shortened(payload or ""),
    ]


def _headers_text(headers: Iterable[tuple[str, str]]) -> str:
    return shortened(" ".join(f"{name}={value}" for name, value in headers))


def _print_entries(entries: Sequence[QueueEntry], state: State, as_json: bool) -> None:
    if as_json:
        for entry in entries:
            print_json(_entry_as_json(entry), line=True)
        return
    columns = _columns(state)
    if entries and isinstance(entries[0], FoundEntry):
        columns.append(("headers", "headers"))
    print_table(
        [title for title, _ in columns],
        [[_cell(entry, attribute) for _, attribute in columns] for entry in entries],
    )


def _columns(state: State) -> list[tuple[str, str]]:
    first = [("id", "message_id"), ("priority", "priority"), ("attempts", "attempts")]
    rest = {
        State.AVAILABLE: [("since", "visible_at_ms"), ("expires at", "expires_at_ms")],
        State.DELAYED: [("until", "visible_at_ms"), ("expires at", "expires_at_ms")],
        State.IN_FLIGHT: [
            ("claimed at", "claimed_at_ms"),
            ("until", "lease_deadline_ms"),
            ("consumer", "consumer"),
        ],
        State.DONE: [("done at", "finished_at_ms")],
        State.FAILED: [
            ("failed at", "finished_at_ms"),
            ("consumer", "consumer"),
            ("error", "error"),
        ],
    }[state]
    return ([first[0], first[2]] if state is State.DONE else first) + rest


def _cell(entry: QueueEntry, attribute: str) -> object:
    value = getattr(entry, attribute)
    if attribute == "headers":
        return _headers_text(value)
    if attribute.endswith("_ms"):
        return time_text(value)
    return shortened(value) if isinstance(value, str) else value
