"""``odq publish``: one message, or a file of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer
from rich.console import Console
from rich.progress import Progress

from opendata_queue.api.sync import System
from opendata_queue.cli.common import (
    AsJson,
    Store,
    Token,
    complain,
    duration_ms,
    duration_seconds,
    pairs,
    plural,
    print_json,
    system_at,
)
from opendata_queue.cli.json_messages import message_of_line
from opendata_queue.model.errors import InvalidInputError, OdqError
from opendata_queue.model.messages import NewMessage

_MAX_LINE_BYTES: Final = 32 * 1024 * 1024
_MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
_INTERRUPTED: Final = 130


def publish(
    payload: Annotated[
        str | None,
        typer.Argument(
            metavar="PAYLOAD", help="The payload, as text; - or nothing reads standard input."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Take the bytes of a file as the payload.")
    ] = None,
    uri: Annotated[
        str | None,
        typer.Option(help="Publish no payload but where it is, a URI that is yours to keep."),
    ] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option("--jsonl", help="Publish a message for each line of JSON; - is stdin."),
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option("--lines", help="Publish each line of a file as it is; - is stdin."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated."),
    ] = None,
    delay: Annotated[
        int | None,
        typer.Option(
            parser=duration_ms, metavar="DURATION", help="Let it be claimed only after so long."
        ),
    ] = None,
    retention: Annotated[
        int,
        typer.Option(
            parser=duration_seconds,
            metavar="DURATION",
            help="Forget it after so long; or: forever.",
        ),
    ] = 0,
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="Publish it only once, however often it is tried with this key."),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many lines are made durable at a time.")
    ] = 500,
    from_line: Annotated[int, typer.Option(min=1, help="Leave out the lines before this one.")] = 1,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Publish a message, or many. Queues get it by their filters, which read the headers.

    Prints the message's id once it is durable. With --jsonl or --lines it prints how many there
    were, or with --json a line for each; if a line is wrong, those before it are published, and it
    says which line, and how to go on.

    A line of --jsonl is an object with one of payload (text), payload_base64 and payload_uri, and
    any of headers, delay_ms, visible_at_ms, created_at_ms, retention_seconds and idempotency_key.
    What `odq consume --json` prints will do. Options say what a line does not.

    Examples:
      odq publish 'hello' --header type=greeting
      odq publish --file photo.jpg --header type=photo --retention 7d
      date | odq publish --delay 5m
      odq publish --jsonl messages.jsonl
    """
    many = jsonl if jsonl is not None else lines
    given = {"PAYLOAD": payload, "--file": file, "--uri": uri, "--jsonl": jsonl, "--lines": lines}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidInputError(f"{' and '.join(named)} exclude each other")
    message = NewMessage(
        headers=pairs(header, "--header"),
        delay_ms=delay,
        retention_seconds=retention,
        idempotency_key=idempotency_key,
    )
    if many is None:
        _publish_one(message, payload, file, uri, store, token, as_json)
        return
    if idempotency_key is not None:
        raise InvalidInputError("one --idempotency-key for many messages would keep only the first")

    def made_of(line: bytes) -> NewMessage:
        return message_of_line(line, message) if jsonl is not None else _plain(line, message)

    with _opened(many) as source, system_at(store, token) as system:
        publishing = _Lines(system, batch, as_json)
        publishing.publish(source, made_of, from_line)
    if not as_json:
        typer.echo(f"published {plural(publishing.published, 'message')}")


def _publish_one(
    message: NewMessage,
    payload: str | None,
    file: Path | None,
    uri: str | None,
    store: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    if uri is not None:
        message.payload_uri = uri
    else:
        message.payload = _payload(payload, file)
    with system_at(store, token) as system:
        try:
            (message_id,) = system.publish_many([message])
        except InvalidInputError as error:
            raise InvalidInputError(_without_index(error)) from error
    if as_json:
        print_json({"message_id": message_id})
    else:
        typer.echo(str(message_id))


def _payload(text: str | None, file: Path | None) -> bytes:
    if file is not None and str(file) != "-":
        return file.read_bytes()
    if text is not None and text != "-":
        return text.encode(errors="surrogateescape")  # as the shell gave it
    if sys.stdin.isatty():
        raise InvalidInputError("no payload is given: as an argument, with --file, or through |")
    return sys.stdin.buffer.read()


def _plain(line: bytes, defaults: NewMessage) -> NewMessage:
    return NewMessage(
        line,
        headers=defaults.headers,
        delay_ms=defaults.delay_ms,
        retention_seconds=defaults.retention_seconds,
    )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    with path.open("rb") as source:
        yield source


class _Lines:
    """Publishes the lines of a file in batches, and knows how far it has come."""

    def __init__(self, system: System, batch: int, as_json: bool) -> None:
        self.published = 0
        self._system = system
        self._batch = batch
        self._as_json = as_json
        self._waiting: list[tuple[int, NewMessage]] = []
        self._waiting_bytes = 0

    def publish(
        self, source: BinaryIO, made_of: Callable[[bytes], NewMessage], from_line: int
    ) -> None:
        try:
            self._publish(source, made_of, from_line)
        except OdqError as error:
            error.add_note(self._so_far())
            raise
        except KeyboardInterrupt:
            complain(f"interrupted; {self._so_far()}")
            raise typer.Exit(_INTERRUPTED) from None

    def _publish(
        self, source: BinaryIO, made_of: Callable[[bytes], NewMessage], from_line: int
    ) -> None:
        try:
            for number, line in _numbered(source, from_line):
                with _named(number):
                    message = made_of(line)
                self._add(number, message, len(line))
        except InvalidInputError:
            self._flush()  # what is in front of the line that is wrong
            raise
        self._flush()

    def _so_far(self) -> str:
        return f"{plural(self.published, 'message')} published before it"

    def _add(self, number: int, message: NewMessage, size_bytes: int) -> None:
        if self._waiting_bytes + size_bytes > _MAX_BATCH_BYTES:
            self._flush()
        self._waiting.append((number, message))
        self._waiting_bytes += size_bytes
        if len(self._waiting) >= self._batch:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        try:
            ids = self._system.publish_many([message for _, message in waiting])
        except InvalidInputError:
            self._publish_each(waiting)  # nothing of it was written; one of them is wrong
        else:
            self._report([number for number, _ in waiting], ids)

    def _publish_each(self, waiting: list[tuple[int, NewMessage]]) -> None:
        for number, message in waiting:
            with _named(number):
                ids = self._system.publish_many([message])
            self._report([number], ids)

    def _report(self, numbers: list[int], ids: list[int]) -> None:
        self.published += len(ids)
        if self._as_json:
            for number, message_id in zip(numbers, ids, strict=True):
                print_json({"line": number, "message_id": message_id}, line=True)


def _numbered(source: BinaryIO, from_line: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, without their ends, and a bar that shows how far they are."""
    shown = sys.stderr.isatty()
    size = _size_of(source)
    with Progress(console=Console(stderr=True), disable=not shown, transient=True) as progress:
        bar = progress.add_task("publishing", total=size)
        number = 0
        while line := source.readline(_MAX_LINE_BYTES + 1):
            number += 1
            progress.advance(bar, len(line))
            if len(line) > _MAX_LINE_BYTES:
                raise InvalidInputError(
                    f"line {number}: is over the limit of {_MAX_LINE_BYTES} bytes; "
                    "publish its payload alone, with --file"
                )
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if line and number >= from_line:
                yield number, line


def _size_of(source: BinaryIO) -> int | None:
    """None for a pipe, whose end is not known."""
    try:
        return Path(source.name).stat().st_size
    except (AttributeError, OSError, TypeError):
        return None


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Say in which line it is that something is wrong, and how to go on from there."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(
            f"line {number}: {_without_index(error)} (when it is mended, --from-line {number} "
            "goes on from there)"
        ) from error


def _without_index(error: InvalidInputError) -> str:
    return str(error).removeprefix("message 0: ")
