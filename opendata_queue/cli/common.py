"""What all commands share: where the store is, how to fail, and how to print."""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from opendata_queue.api.sync import System
from opendata_queue.cli.hosts import given_hosts
from opendata_queue.filters import FilterError
from opendata_queue.http.token_hosts import TokenHosts
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import (
    InvalidInputError,
    OdqError,
    QueueNotFoundError,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.model.safe_text import harmless, json_text
from opendata_queue.opening import open as open_system
from opendata_queue.root.descriptor import SystemDescriptor, read_root
from opendata_queue.root.owner_files import find_broker
from opendata_queue.store import Location, Objects, StoreKind, StoreSettings

T = TypeVar("T")

FAILED: Final = 1
WRONG_INPUT: Final = 2
NOTHING_THERE: Final = 3

# A person waits: half a minute without an answer is an outage.
_SETTINGS: Final = StoreSettings(outage_timeout_ms=30_000)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")

_STORE_HELP: Final = (
    "Where the queues are: file:///path, s3://bucket/prefix, or http://host:port of a server."
)
Store = Annotated[
    str | None, typer.Option("--store", metavar="URL", envvar="ODQ_STORE", help=_STORE_HELP)
]
RootStore = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        envvar="ODQ_STORE",
        help="The root: file:///path or s3://bucket/prefix. A server can't be asked for this.",
    ),
]
"""The store of commands that open the root themselves."""
StoreArgument = Annotated[
    str | None, typer.Argument(metavar="URL", help="The same as --store URL.", show_default=False)
]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar="ODQ_TOKEN", help="What a server wants to see, if it asks."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]


# --- failing --------------------------------------------------------------------------------------


class Commands(TyperGroup):
    """The root of all commands: an error becomes a line and an exit code, not a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except OdqError as error:
            _say_failure(ctx, str(error), error)
            raise typer.Exit(exit_code_of(error)) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output has ended
            _say_failure(ctx, _reason(error), error)
            raise typer.Exit(FAILED) from None
        except Exception as error:
            # Typer's own errors, which have an exit code, are for Typer to show.
            if hasattr(error, "exit_code") or isinstance(error, typer.Abort):
                raise
            hint = "this should not happen; `odq --debug …` shows where it comes from"
            _say_failure(ctx, f"{type(error).__name__}: {error} ({hint})", error)
            raise typer.Exit(FAILED) from None


def _say_failure(ctx: typer.Context, text: str, error: BaseException) -> None:
    if ctx.params.get("debug"):
        typer.echo(harmless("".join(traceback.format_exception(error)), keep="\n"), err=True)
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    if not isinstance(error, FilterError):  # which points at the place, on lines of its own
        text = " ".join(text.split())
    complain(text)


def _reason(error: OSError) -> str:
    if not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, QueueNotFoundError):
        return NOTHING_THERE
    return WRONG_INPUT if isinstance(error, InvalidInputError) else FAILED


def complain(text: str) -> None:
    typer.echo(harmless(f"Error: {text}", keep="\n"), err=True)


def note(text: str) -> None:
    """Print something that only a person wants to know: not into a pipe or a file."""
    if sys.stderr.isatty():
        typer.echo(harmless(text), err=True)


def say(text: str) -> None:
    """A line about what was done, or found."""
    typer.echo(harmless(text))


def confirm(question: str, yes: bool) -> None:
    """Go on only after a yes; without a person to ask, only with ``--yes``."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInputError(f"{question} Say --yes, since no person can be asked")
    if not typer.confirm(harmless(question)):
        raise typer.Exit(FAILED)


# --- the store ------------------------------------------------------------------------------------


def url_of(store: str | None, argument: str | None = None) -> str:
    """The store that was given, as an option, as an argument or in the environment."""
    url = argument or store
    if not url:
        raise InvalidInputError(
            "no store is given: say --store URL, or set ODQ_STORE, for example "
            "file:///var/lib/queues, s3://bucket/prefix or http://localhost:8080"
        )
    return url


def is_remote(url: str) -> bool:
    return url.startswith(("http://", "https://"))


@contextmanager
def system_at(store: str | None, token: str | None) -> Iterator[System]:
    """The system that was asked for, to change something, open until the block is left.

    A root that is served is changed through its broker.
    """
    url = url_of(store)
    _be_quiet()
    with _opened(url, token) as system:
        yield system


@contextmanager
def read_only_at(store: str | None, token: str | None) -> Iterator[System]:
    """The system that was asked for, to read only: its owner is not disturbed."""
    url = url_of(store)
    _be_quiet()
    with _connected(url, token) if is_remote(url) else _read_only(url) as system:
        yield system


def _be_quiet() -> None:
    # A person at a terminal can't change how fast a commit is made.
    logging.getLogger("opendata_queue.store.rows.writer").setLevel(logging.ERROR)


def _read_only(url: str) -> System:
    root_location(url)
    return open_system(url, read_only=True)


def _connected(url: str, token: str | None) -> System:
    remote: dict[str, Any] = {"token": token} if token else {}
    return open_system(url, **remote, hosts=given_hosts())


def _opened(url: str, token: str | None) -> System:
    if is_remote(url):
        return _connected(url, token)
    asyncio.run(check_root(url))
    address = asyncio.run(find_broker(url, settings=_SETTINGS))
    if address is not None and is_remote(address):
        # A file in the store says so: an attacker who can write one must not get the token.
        TokenHosts(given_hosts(), broker=None, token=bool(token)).check(address, said_by=url)
        try:
            system = _connected(address, token)
        except StoreUnavailableError as error:
            # If the broker is gone for good, the root can be opened; if not, opening it fails.
            note(f"{error}")
        else:
            note(f"through {address}, where it is served")
            return system
    return open_system(url, settings=_SETTINGS)


async def check_root(url: str) -> None:
    """Refuse a URL without a root: opening it would make one, even if the URL has a typo.

    A root of a newer release is refused, too.
    """
    if await read_descriptor(url) is None:
        raise StoreAccessError(f"there is no root at {url}: make one with `odq init {url}`")


async def read_descriptor(url: str) -> SystemDescriptor | None:
    """What ``system.json`` says, without making anything."""
    location = root_location(url)
    if location.kind is StoreKind.FILE and not location.folder.is_dir():
        return None
    return await read_root(objects_at(url))


def root_location(url: str) -> Location:
    """The location of a root that this command opens by itself."""
    if is_remote(url):
        raise StoreAccessError(f"{url} is a server: this command reads a root, file:///… or s3://…")
    location = Location.parse(url)
    if location.kind is StoreKind.MEMORY:
        raise StoreAccessError(
            f"{url} lives within one process and would be gone with this command: "
            "use file:///… or s3://…"
        )
    return location


def objects_at(url: str) -> Objects:
    root_location(url)
    return Objects.open(url, _SETTINGS)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


# --- options --------------------------------------------------------------------------------------


def duration_ms(text: str | int) -> int:
    """Milliseconds from a text like 500ms, 30s, 1.5h or 7d."""
    if isinstance(text, int):
        return text
    if text.strip() == "0":
        return 0
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(
            f"{text!r} is no duration: write a number with its unit, "
            "one of ms, s, m, h, d and w, like 30s"
        )
    return round(float(found[1]) * _UNITS_MS[found[2]])


def duration_seconds(text: str | int) -> int:
    """Whole seconds from a text like 30s or 7d; ``forever`` is 0."""
    if isinstance(text, int):
        return text
    if text.strip() in ("forever", "for ever"):
        return 0
    milliseconds = duration_ms(text)
    if milliseconds % 1_000:
        raise typer.BadParameter(f"{text!r} is not a whole number of seconds")
    return milliseconds // 1_000


def moment_ms(text: str | int) -> int:
    """A time from milliseconds since 1970, or from a duration like 2h that ends now."""
    if isinstance(text, int):
        return text
    if text.isdigit() and text.isascii():
        return int(text)
    return max(0, SystemClock().now_ms() - duration_ms(text))


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """Headers as they are given: NAME=VALUE."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} has no =; write NAME=VALUE", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint=option)
        found[name] = value
    return found


# --- printing -------------------------------------------------------------------------------------


def print_json(value: object, *, line: bool = False) -> None:
    """One document; with ``line`` one of many, on a line of its own."""
    typer.echo(json_text(as_json_value(value), indent=None if line else 2))


def as_json_value(value: Any) -> Any:
    """What JSON can hold. Ids are decimal strings: 64 bits do not survive every reader."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {key: _member(key, member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(member) for member in value]
    return value


def _member(key: str, value: Any) -> Any:
    if key.endswith("message_id") and isinstance(value, int):
        return str(value)
    if key == "headers" and isinstance(value, tuple):
        return dict(value)
    return as_json_value(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table; into a pipe or a file, plain columns with nothing cut off."""
    if sys.stdout.isatty():
        Console().print(table_of(columns, rows))
    else:
        _print_plain([list(columns), *_texts(rows)])


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table for a terminal."""
    cells = _texts(rows)
    typed = [_is_number(column) for column in zip(*cells, strict=True)] or [False] * len(columns)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column, number in zip(columns, typed, strict=True):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _texts(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    return [["" if cell is None else harmless(str(cell)) for cell in row] for row in rows]


def _print_plain(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def _is_number(column: Sequence[str]) -> bool:
    return all(re.fullmatch(r"[\d,.]*", cell) for cell in column)


def print_fields(pairs: Iterable[tuple[str, object]]) -> None:
    """A line for each thing that is known."""
    shown = [(harmless(n), harmless(str(value))) for n, value in pairs if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        typer.echo(f"{name.ljust(width)}  {value}")


def time_text(milliseconds: int | None) -> str | None:
    """A time as people read it, in UTC."""
    if milliseconds is None:
        return None
    try:
        moment = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return str(milliseconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration_text(milliseconds: int | None) -> str | None:
    """A duration with its two largest units: 2d 3h, 1m 5s, 250ms."""
    if milliseconds is None:
        return None
    if milliseconds < 1_000:
        return f"{milliseconds}ms"
    parts = []
    left = milliseconds
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, _UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def retention_text(seconds: int) -> str | None:
    return "for ever" if seconds == 0 else duration_text(seconds * 1_000)


def safe_text(data: bytes) -> str:
    """A payload for a terminal: nothing in it can move the cursor or ring the bell."""
    return harmless(data.decode(errors="backslashreplace"), keep="\n\t")


def shortened(text: str, most: int = 200) -> str:
    """One line of a text, for a table."""
    line = safe_text(" ".join(text.split()).encode(errors="replace"))
    return line if len(line) <= most else f"{line[: most - 1]}…"


def write_out(data: bytes) -> None:
    """Bytes to standard output as they are, at once."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


# --- help -----------------------------------------------------------------------------------------


def flow_help(app: typer.Typer) -> None:
    """Let the help of all commands flow with the terminal's width.

    Typer keeps the line ends of a docstring but for its first paragraph. Here a paragraph with an
    indented line in it, a list of examples, is kept as it is, and all others are joined.
    """
    for command in app.registered_commands:
        text = command.help or (command.callback.__doc__ if command.callback else None)
        command.help = _flowed(text or "")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            flow_help(group.typer_instance)
    if isinstance(app.info.help, str):
        app.info.help = _flowed(app.info.help)


def _flowed(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if "\n " in p else p.replace("\n", " ") for p in paragraphs)
