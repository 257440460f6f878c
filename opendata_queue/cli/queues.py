"""``odq queues``: make, change, watch and remove queues."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from opendata_queue.api.sync import System
from opendata_queue.cli.common import (
    AsJson,
    QueueName,
    Store,
    Token,
    Yes,
    confirm,
    duration_ms,
    duration_seconds,
    duration_text,
    moment_ms,
    plural,
    print_fields,
    print_json,
    print_table,
    read_only_at,
    retention_text,
    say,
    system_at,
    table_of,
    time_text,
)
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.options import QueueOptions
from opendata_queue.model.values import QueueInfo, QueueStats, Start

app = typer.Typer(
    help="Make, change, watch and remove queues.",
    no_args_is_help=True,
)

_COLUMNS = ("available", "delayed", "in_flight", "done", "failed", "expired")


def _ms(help: str, name: str) -> Any:
    return typer.Option(f"--{name}", parser=duration_ms, metavar="DURATION", help=help)


def _seconds(help: str, name: str) -> Any:
    return typer.Option(f"--{name}", parser=duration_seconds, metavar="DURATION", help=help)


FilterOption = Annotated[
    str | None,
    typer.Option(
        "--filter", metavar="EXPR", help="Which messages it gets; all of them if not said."
    ),
]
MaxAttempts = Annotated[
    int | None, typer.Option(help="Claims before a message fails for good; 0 is without limit.")
]
Lease = Annotated[int | None, _ms("How long a claim is held, if not said otherwise.", "lease")]
MaxLease = Annotated[int | None, _ms("The longest that a consumer may ask for.", "max-lease")]
Backoff = Annotated[int | None, _ms("The rest of a message after its first failure.", "backoff")]
BackoffFactor = Annotated[float | None, typer.Option(help="By how much it grows each time.")]
MaxBackoff = Annotated[int | None, _ms("The longest rest.", "max-backoff")]
BackoffJitter = Annotated[
    float | None, typer.Option(help="The part of a rest, 0 to 1, that chance may take away.")
]
DoneRetention = Annotated[
    int | None,
    _seconds("How long done messages are remembered; or: forever.", "done-retention"),
]
FailedRetention = Annotated[
    int | None, _seconds("How long failed messages are kept; or: forever.", "failed-retention")
]
MaxInFlight = Annotated[int | None, typer.Option(help="How many may be claimed at once.")]
RelaxedClaims = Annotated[
    bool | None,
    typer.Option(
        "--relaxed-claims/--no-relaxed-claims",
        help="Hand messages out before the claim is durable: faster, and a crash may repeat them.",
        show_default=False,
    ),
]
Paused = Annotated[
    bool | None,
    typer.Option("--paused/--no-paused", help="Let claims get nothing.", show_default=False),
]
Window = Annotated[int | None, typer.Option(help="How many messages are kept at hand.")]
Bucket = Annotated[int | None, typer.Option(help="How many done or failed ones make a bucket.")]


@app.command("list")
def list_queues(
    prefix: Annotated[str, typer.Option(help="Only queues whose names begin with it.")] = "",
    after: Annotated[str, typer.Option(help="Only queues behind that name.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="No more than so many.")] = None,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List queues, and how many messages are where.

    Examples:
      odq queues list
      odq queues list --prefix shop/ --limit 100
    """
    with read_only_at(store, token) as system:
        names = system.list_queues(prefix=prefix, after=after, limit=limit)
        rows = [(name, system.stats(name)) for name in names]
    if as_json:
        print_json([{"name": name, **asdict(stats)} for name, stats in rows])
    else:
        print_table(_titles(), [_cells(name, stats) for name, stats in rows])


@app.command("create")
def create_queue(
    queue: QueueName,
    filter: FilterOption = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="Which older messages it gets: now (none), beginning (all), a time in ms since "
            "1970, or a duration, like 2h, for those of the last two hours.",
        ),
    ] = "now",
    max_attempts: MaxAttempts = None,
    lease: Lease = None,
    max_lease: MaxLease = None,
    backoff: Backoff = None,
    backoff_factor: BackoffFactor = None,
    max_backoff: MaxBackoff = None,
    backoff_jitter: BackoffJitter = None,
    done_retention: DoneRetention = None,
    failed_retention: FailedRetention = None,
    max_in_flight: MaxInFlight = None,
    relaxed_claims: RelaxedClaims = None,
    paused: Paused = None,
    window: Window = None,
    bucket: Bucket = None,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Make a queue of the messages that satisfy a filter.

    `odq filter test` tries a filter first. Durations have a unit: 500ms, 30s, 5m, 2h, 7d.

    Examples:
      odq queues create all
      odq queues create emails --filter "type = 'order.created' AND total > 100"
      odq queues create audit --start beginning --lease 5m --max-attempts 20
    """
    changes = _changes(locals())
    options = QueueOptions().with_changes(changes)
    with system_at(store, token) as system:
        made = system.create_queue(queue, filter=filter or "", options=options, start=_start(start))
    _show_info(made, as_json)


@app.command("update")
def update_queue(
    queue: QueueName,
    filter: Annotated[
        str | None,
        typer.Option(
            "--filter", metavar="EXPR", help="For messages from now on; '' is for all of them."
        ),
    ] = None,
    max_attempts: MaxAttempts = None,
    lease: Lease = None,
    max_lease: MaxLease = None,
    backoff: Backoff = None,
    backoff_factor: BackoffFactor = None,
    max_backoff: MaxBackoff = None,
    backoff_jitter: BackoffJitter = None,
    done_retention: DoneRetention = None,
    failed_retention: FailedRetention = None,
    max_in_flight: MaxInFlight = None,
    relaxed_claims: RelaxedClaims = None,
    paused: Paused = None,
    window: Window = None,
    bucket: Bucket = None,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Change a queue's filter or options; what is not named stays as it is.

    Example: odq queues update emails --lease 2m --max-attempts 10
    """
    changes = _changes(locals())
    if filter is None and not changes:
        raise InvalidInputError("nothing to change is named; `odq queues update --help` lists all")
    with system_at(store, token) as system:
        changed = system.update_queue(queue, filter=filter, **changes)
    _show_info(changed, as_json)


@app.command("show")
def show_queue(
    queue: QueueName, store: Store = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Show a queue's filter and options.

    Example: odq queues show emails
    """
    with read_only_at(store, token) as system:
        found = system.get_queue(queue)
    _show_info(found, as_json)


@app.command("pause")
def pause_queue(
    queue: QueueName, store: Store = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Let claims get nothing until the queue is resumed. Messages still come in.

    Example: odq queues pause emails
    """
    with system_at(store, token) as system:
        system.pause_queue(queue)
    _done(as_json, f"paused queue {queue}", queue=queue, paused=True)


@app.command("resume")
def resume_queue(
    queue: QueueName, store: Store = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Let claims get messages again.

    Example: odq queues resume emails
    """
    with system_at(store, token) as system:
        system.resume_queue(queue)
    _done(as_json, f"resumed queue {queue}", queue=queue, paused=False)


@app.command("purge")
def purge_queue(
    queue: QueueName,
    yes: Yes = False,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Drop the messages that wait, available and delayed.

    What is in flight, done or failed stays; `odq failed purge` drops failed ones.

    Example: odq queues purge emails --yes
    """
    confirm(f"Drop all messages that wait in queue {queue}?", yes)
    with system_at(store, token) as system:
        count = system.purge_queue(queue)
    _done(
        as_json, f"dropped {plural(count, 'message')} of queue {queue}", queue=queue, purged=count
    )


@app.command("delete")
def delete_queue(
    queue: QueueName,
    yes: Yes = False,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Delete a queue and all that it holds. Other queues keep their messages.

    Example: odq queues delete emails --yes
    """
    confirm(f"Delete queue {queue} and all that it holds?", yes)
    with system_at(store, token) as system:
        system.delete_queue(queue)
    _done(as_json, f"deleted queue {queue}", queue=queue, deleted=True)


@app.command("stats")
def show_stats(
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE...", help="All queues if none is named.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C, drawn anew each time.")
    ] = False,
    interval: Annotated[
        int, _ms("How long to wait between two updates, with --watch.", "interval")
    ] = 2_000,
    times: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many updates, with --watch.")
    ] = None,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show how many messages are where, and how old the oldest available one is.

    Into a pipe, or with --json, --watch prints one update after the other.

    Examples:
      odq queues stats
      odq queues stats emails --watch --interval 1s
    """
    with read_only_at(store, token) as system:
        if not watch:
            _print_snapshot(_snapshot(system, queues), as_json)
            return
        snapshots = _snapshots(system, queues, interval, times)
        if as_json or not sys.stdout.isatty():
            for snapshot in snapshots:
                _print_snapshot(snapshot, as_json, line=True)
        else:
            with Live(console=Console(), auto_refresh=False) as live:
                for snapshot in snapshots:
                    live.update(_table(snapshot), refresh=True)


Snapshot = list[tuple[str, QueueStats]]


def _snapshot(system: System, queues: list[str] | None) -> Snapshot:
    return [(name, system.stats(name)) for name in queues or system.list_queues()]


def _snapshots(
    system: System, queues: list[str] | None, interval_ms: int, times: int | None
) -> Iterator[Snapshot]:
    """The statistics of the queues, again and again; Ctrl-C ends it."""
    never = threading.Event()
    count = 0
    try:
        while True:
            yield _snapshot(system, queues)
            count += 1
            if count == times:
                return
            never.wait(interval_ms / 1000)
    except KeyboardInterrupt:
        return


def _print_snapshot(snapshot: Snapshot, as_json: bool, *, line: bool = False) -> None:
    if as_json:
        print_json([{"name": name, **asdict(stats)} for name, stats in snapshot], line=line)
    else:
        print_table(_titles(), [_cells(name, stats) for name, stats in snapshot])


def _table(snapshot: Snapshot) -> Table:
    return table_of(_titles(), [_cells(name, stats) for name, stats in snapshot])


def _titles() -> list[str]:
    return ["queue", *(name.replace("_", " ") for name in _COLUMNS), "oldest", "replaying"]


def _cells(name: str, stats: QueueStats) -> list[object]:
    counts = [getattr(stats, column) for column in _COLUMNS]
    return [name, *counts, duration_text(stats.oldest_age_ms) or "-", stats.replaying]


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a queue that were named, by the names that the API has for them."""
    changes = {}
    for field in fields(QueueOptions):
        name = field.name.removesuffix("_ms").removesuffix("_seconds")
        if given.get(name) is not None:
            changes[field.name] = given[name]
    return changes


def _start(text: str) -> Start:
    if text in ("now", "beginning"):
        return text  # type: ignore[return-value]
    return moment_ms(text)


def _show_info(info: QueueInfo, as_json: bool) -> None:
    if as_json:
        print_json(info)
        return
    options = info.options
    print_fields(
        [
            ("queue", info.name),
            ("filter", info.filter or "(empty: every message)"),
            ("created at", time_text(info.created_at_ms)),
            ("paused", "yes" if options.paused else "no"),
            ("max attempts", options.max_attempts or "without limit"),
            ("lease", duration_text(options.lease_ms)),
            ("max lease", duration_text(options.max_lease_ms)),
            ("backoff", duration_text(options.backoff_ms)),
            ("backoff factor", options.backoff_factor),
            ("max backoff", duration_text(options.max_backoff_ms)),
            ("backoff jitter", options.backoff_jitter),
            ("done retention", retention_text(options.done_retention_seconds)),
            ("failed retention", retention_text(options.failed_retention_seconds)),
            ("max in flight", options.max_in_flight),
            ("relaxed claims", "yes" if options.relaxed_claims else "no"),
            ("window", options.window),
            ("bucket", options.bucket),
        ]
    )


def _done(as_json: bool, text: str, **document: object) -> None:
    if as_json:
        print_json(document)
    else:
        say(text)
