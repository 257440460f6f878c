"""``odq spark``: jobs for Spark, on this machine or on a cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from opendata_queue.cli.common import (
    AsJson,
    RootStore,
    check_root,
    duration_ms,
    note,
    print_json,
    print_table,
    root_location,
    run,
    url_of,
)
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import (
    InvalidInputError,
    OdqError,
    StoreAccessError,
    StoreUnavailableError,
)

app = typer.Typer(
    help="""Append in bulk with Spark, and ask what a filter would have matched.

It needs pip install 'opendata-queue[spark]' and Java 17. docs/spark.md shows how to use the data
source in pipelines of your own.
""",
    no_args_is_help=True,
)
_AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_AS_THEY_ARE, add_help_option=False)
def append(context: typer.Context) -> None:
    """Append files or tables to a root, exactly once; `append --help` has its options.

    Examples:
      odq spark append orders.parquet --payload body --header type --header region
      odq spark append --format csv new/*.csv --job orders-2026-11-16 --rejects file:///tmp/bad
    """
    raise typer.Exit(_module("append").main(context.args))


@app.command()
def backtest(
    filter: Annotated[str, typer.Option("--filter", help="The filter of the queue to be.")],
    since: Annotated[
        str | None,
        typer.Option(help="Messages received since then: 24h, 7d, or 2026-11-16T00:00:00Z."),
    ] = None,
    examples: Annotated[int, typer.Option(min=0, max=100, help="How many to show.")] = 5,
    master: Annotated[str | None, typer.Option(help="Spark's master.")] = None,
    store: RootStore = None,
    as_json: AsJson = False,
) -> None:
    """Show what a new queue would have received: by the hour, and which filters match it too.

    The latter are the filters that existing queues have now, whenever these were made.

    Examples:
      odq spark backtest --filter "region = 'emea' AND price > 100" --since 7d
    """
    url = url_of(store)
    root_location(url)
    since_ms = None if since is None else _time_of(since)
    sessions, job = _module("sessions"), _module("backtest")
    run(check_root(url))
    spark = sessions.job_session("odq backtest", master)
    try:
        found = job.backtest(spark, url, filter, since_ms=since_ms, examples=examples)
    except OdqError:
        raise
    except Exception as error:  # Spark's own: pages of text, of which one line is for people
        raise StoreUnavailableError(sessions.reason_of(error)) from error
    if as_json:
        print_json(found)
        return
    print_table(["filter", "matches", "of"], [(found.filter, found.matched, found.looked_at)])
    if found.queues_left_out:
        note(f"{found.queues_left_out} queues were not compared with: there are too many")
    print_table(["hour", "messages"], [(_shown(hour), count) for hour, count in found.hours])
    print_table(["queue", "matches as well"], list(found.overlap.items()))
    print_table(
        ["example", "headers"], [(one["message_id"], one["headers"]) for one in found.examples]
    )


def _module(name: str) -> Any:
    """A module that needs Spark, which is there only if it was asked for."""
    from importlib import import_module

    try:
        return import_module(f"opendata_queue.spark.{name}")
    except ImportError as error:
        raise StoreAccessError(f"{error}: install opendata-queue[spark]") from error


def _time_of(text: str) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return SystemClock().now_ms() - duration_ms(text)
    if time.tzinfo is None:
        raise InvalidInputError(f"since is {text!r}, which has no time zone: add Z, or +01:00")
    return int(time.timestamp() * 1000)


def _shown(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="minutes")
