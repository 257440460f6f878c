"""The ``odq`` command."""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated

import typer

from opendata_queue import __version__
from opendata_queue.cli.bench.command import bench
from opendata_queue.cli.common import Commands, flow_help
from opendata_queue.cli.compact import compact
from opendata_queue.cli.consume import consume
from opendata_queue.cli.doctor.command import doctor
from opendata_queue.cli.doctor.repair import repair
from opendata_queue.cli.failed import app as failed_app
from opendata_queue.cli.filter import app as filter_app
from opendata_queue.cli.hosts import take_hosts
from opendata_queue.cli.init import init
from opendata_queue.cli.inspect.root import app as inspect_app
from opendata_queue.cli.messages import app as messages_app
from opendata_queue.cli.publish import publish
from opendata_queue.cli.queues import app as queues_app
from opendata_queue.cli.serve.command import serve
from opendata_queue.cli.serve.tailer import tailer
from opendata_queue.cli.spark import app as spark_app
from opendata_queue.cli.token import token
from opendata_queue.model.safe_text import HarmlessLines

app = typer.Typer(
    name="odq",
    cls=Commands,
    help="""OpenData Queue: a message queue whose only durable state is an object store.

Every command that works on a store takes --store URL, or the variable ODQ_STORE: file:///path,
s3://bucket/prefix, or http://host:port of a server (with --token or ODQ_TOKEN); init, inspect,
compact, repair and spark are for roots only. With --json it prints one JSON document, and what goes
on and on prints a line of JSON for each thing.

A first round:
  export ODQ_STORE=file:///var/lib/queues
  odq init
  odq queues create emails --filter "type = 'order.created'"
  odq publish 'hello' --header type=order.created
  odq consume emails --count 1
  odq queues stats emails

Exit codes: 0 it was done; 1 it failed; 2 something that was given is wrong; 3 there is nothing
there: no such queue or message, or no message came. NO_COLOR is respected.
""",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(init)
app.command()(publish)
app.command()(consume)
app.add_typer(queues_app, name="queues")
app.add_typer(failed_app, name="failed")
app.add_typer(messages_app, name="messages")
app.add_typer(inspect_app, name="inspect")
app.add_typer(filter_app, name="filter")
app.add_typer(spark_app, name="spark")
app.command()(serve)
app.command()(tailer)
app.command()(token)
app.command()(compact)
app.command()(doctor)
app.command()(repair)
app.command()(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"odq {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="ODQ_DEBUG", help="Print the traceback of an error.")
    ] = False,
) -> None:
    pass


take_hosts(app)
flow_help(app)


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not UTF-8 gets a ? here and there instead of a traceback.
        sys.stdout.reconfigure(errors="replace")
    if logging.lastResort is not None:  # warnings quote names that others chose
        logging.lastResort.setFormatter(HarmlessLines("%(message)s"))
    app()
