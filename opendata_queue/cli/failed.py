"""``odq failed``: messages that were given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from opendata_queue.cli.common import (
    AsJson,
    QueueName,
    Store,
    Token,
    Yes,
    confirm,
    note,
    plural,
    print_json,
    print_table,
    read_only_at,
    say,
    shortened,
    system_at,
    time_text,
)
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.values import FailedMessage

app = typer.Typer(
    help="Show messages that were given up; make them available again, or forget them.",
    no_args_is_help=True,
)

Ids = Annotated[
    list[int] | None, typer.Argument(metavar="ID...", help="Which messages, by their ids.")
]
FilterOption = Annotated[
    str | None,
    typer.Option("--filter", metavar="EXPR", help="Those whose headers satisfy a filter."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]


@app.command("list")
def list_failed(
    queue: QueueName,
    filter: FilterOption = None,
    after: Annotated[
        int, typer.Option(metavar="ID", help="Only those with a larger id, for the next page.")
    ] = -1,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000)] = 100,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List failed messages by ascending id, with their last error.

    Examples:
      odq failed list emails
      odq failed list emails --filter "type = 'order.created'" --json
    """
    with read_only_at(store, token) as system:
        found = system.failed(queue, filter=filter, after_id=after, limit=limit)
    if as_json:
        print_json(found)
        return
    print_table(("id", "failed at", "attempts", "consumer", "error"), [_cells(m) for m in found])
    if len(found) == limit:
        note(f"there may be more: --after {found[-1].message_id}")


@app.command("replay")
def replay_failed(
    queue: QueueName,
    ids: Ids = None,
    filter: FilterOption = None,
    every: AllOption = False,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Make failed messages available again, with all their attempts.

    Say which: by their ids, with --filter, or --all. An id that is not failed is passed over.

    Examples:
      odq failed replay emails 4711 4712
      odq failed replay emails --all
    """
    _check_choice(ids, filter, every)
    with system_at(store, token) as system:
        count = system.stats(queue).failed
        done = _in_turns(system.replay, queue, ids or [], filter, every, count)
    _report(done, "replayed", queue, as_json)


@app.command("purge")
def purge_failed(
    queue: QueueName,
    ids: Ids = None,
    filter: FilterOption = None,
    every: AllOption = False,
    yes: Yes = False,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Forget failed messages of a queue. Other queues keep theirs.

    Say which: by their ids, with --filter, or --all.

    Examples:
      odq failed purge emails 4711
      odq failed purge emails --filter "type = 'test'" --yes
    """
    _check_choice(ids, filter, every)
    confirm(f"Forget these failed messages of queue {queue}?", yes)
    with system_at(store, token) as system:
        count = system.stats(queue).failed
        done = _in_turns(system.purge_failed, queue, ids or [], filter, every, count)
    _report(done, "purged", queue, as_json)


def _check_choice(ids: list[int] | None, filter: str | None, every: bool) -> None:
    if sum((bool(ids), filter is not None, every)) != 1:
        raise InvalidInputError("say which messages: by their IDs, with --filter, or with --all")


def _in_turns(
    call: Callable[..., list[int]],
    queue: str,
    ids: list[int],
    filter: str | None,
    every: bool,
    count: int,
) -> list[int]:
    """Repeat a call, which does some thousands, until as many are done as there were at first."""
    if ids:
        return call(queue, *ids)
    done: list[int] = []
    while len(done) < count:
        some = call(queue, all=every, filter=filter, limit=min(10_000, count - len(done)))
        if not some:
            break
        done += some
    return done


def _report(done: list[int], verb: str, queue: str, as_json: bool) -> None:
    if as_json:
        print_json({"queue": queue, verb: [str(one) for one in done]})
    else:
        say(f"{verb} {plural(len(done), 'message')} of queue {queue}")


def _cells(message: FailedMessage) -> list[object]:
    return [
        message.message_id,
        time_text(message.failed_at_ms),
        message.attempts,
        message.consumer,
        shortened(message.error),
    ]
