"""The ``odq`` command."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from opendata_queue import __version__
from opendata_queue.cli.filter import app as filter_app
from opendata_queue.cli.inspect import app as inspect_app

app = typer.Typer(
    name="odq",
    help="OpenData Queue: a message queue whose only durable state is an object store.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(inspect_app, name="inspect")
app.add_typer(filter_app, name="filter")


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
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not UTF-8 gets a ? here and there instead of a traceback.
        sys.stdout.reconfigure(errors="replace")
    app()
