"""``odq consume``: print messages, write them to a file, or run a command for each."""

from __future__ import annotations

import enum
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from opendata_queue.api.sync import Consumer, System
from opendata_queue.cli.common import (
    FAILED,
    NOTHING_THERE,
    AsJson,
    QueueName,
    Store,
    Token,
    duration_ms,
    note,
    plural,
    print_json,
    safe_text,
    system_at,
    write_out,
)
from opendata_queue.cli.json_messages import json_line, message_as_json
from opendata_queue.cli.message_command import Command
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.messages import ClaimedMessage, StoredMessage

_BATCH: Final = 100
_HELD: Final = 10
_MAX_HELD: Final = 1_000


class Format(enum.StrEnum):
    TEXT = "text"
    HEX = "hex"
    JSON = "json"


def consume(
    queue: QueueName,
    format: Annotated[
        Format, typer.Option(help="How a message is printed; text is its payload as it is.")
    ] = Format.TEXT,
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run a line of shell for each message."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Append to a file; acked when it is on the disk."),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="End after so many messages.")
    ] = None,
    idle: Annotated[
        int | None,
        typer.Option(
            parser=duration_ms, metavar="DURATION", help="End when none has come for so long."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000, help="How many are claimed at a time; 100, and 1 with --exec."
        ),
    ] = None,
    lease: Annotated[
        int | None,
        typer.Option(
            parser=duration_ms,
            metavar="DURATION",
            help="How long a claim is held; it is extended while a message is worked on.",
        ),
    ] = None,
    consumer: Annotated[
        str | None, typer.Option(help="Under what name, for the messages' histories.")
    ] = None,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Print up to --count, or 10, and give them back.")
    ] = False,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Take messages from a queue, and ack each one after it was printed or handled.

    With --exec, a command that exits with 0 acks its message; any other exit code nacks it, with
    the end of what it wrote to stderr as the error. It gets the payload on its standard input, and
    ODQ_MESSAGE_ID, ODQ_QUEUE, ODQ_ATTEMPTS, ODQ_PRIORITY, ODQ_PAYLOAD_URI, ODQ_HEADERS (as JSON)
    and an ODQ_HEADER_NAME for each header in its environment. A command that is not found ends it
    all, and its message is given back.

    Without --count and --idle it goes on until Ctrl-C, which lets a command end first; a second
    one ends the command and gives its message back. Exits with 0 at its end or at Ctrl-C, with 3
    if no message came, and with 1 if a command failed, or a lease was lost while it ran.

    On file:/// and s3:// it is the one owner of the root while it runs; for others to use the
    queues meanwhile, run `odq serve`, and consume from its http://host:port.

    Examples:
      odq consume emails
      odq consume emails --json --count 10 --idle 5s
      odq consume thumbnails --exec 'convert - -resize 200 "thumbs/$ODQ_MESSAGE_ID.png"'
      odq consume audit --output audit.jsonl --format json --idle 0
    """
    if as_json:
        format = Format.JSON
    if command is not None and (output is not None or no_ack):
        raise InvalidInputError("--exec excludes --output and --no-ack")
    with system_at(store, token) as system, _sink(output, format) as put:
        if no_ack:
            _print_and_release(system, queue, put, count, idle or 0, consumer)
            return
        loop = system.consumer(
            queue,
            batch=batch or (_BATCH if command is None else 1),
            lease_ms=lease,
            consumer=consumer,
            limit=count,
            idle_ms=idle,
        )
        handler = _Printer(put) if command is None else _Runner(command, as_json)
        interrupted = _consume(loop, handler)
    note(f"consumed {plural(handler.count, 'message')}, of which {handler.failed} failed")
    if handler.failed:
        raise typer.Exit(FAILED)
    if not handler.count and not interrupted:
        raise typer.Exit(NOTHING_THERE)


def _consume(loop: Consumer, handler: _Printer | _Runner) -> bool:
    """Handle messages to the end; true if a signal was the reason to end."""
    stop = _Stop(handler.end)
    try:
        with stop.installed(), loop:
            for message in loop:
                with stop.waits():
                    handler.handle(message, loop)
                if stop.asked:
                    break
    except KeyboardInterrupt:
        return True
    return stop.asked


def _print_and_release(
    system: System,
    queue: str,
    put: Callable[[StoredMessage], None],
    count: int | None,
    wait_ms: int,
    consumer: str | None,
) -> None:
    wanted = _HELD if count is None else count
    if wanted > _MAX_HELD:
        raise InvalidInputError(f"--count is {wanted}; --no-ack can hold {_MAX_HELD} at most")
    held = system.claim(queue, wanted, wait_ms=wait_ms, consumer=consumer)
    if not held:
        raise typer.Exit(NOTHING_THERE)
    try:
        for message in held:
            put(message)
    finally:
        system.release(queue, *held)


# --- what is done with a message ------------------------------------------------------------------


class _Printer:
    def __init__(self, put: Callable[[StoredMessage], None]) -> None:
        self._put = put
        self.count = 0
        self.failed = 0

    def handle(self, message: ClaimedMessage, loop: Consumer) -> None:
        try:
            self._put(message)
        except OSError:
            # The reader has ended, or the disk is full: the message is not to blame.
            loop.release()
            raise
        self.count += 1

    def end(self) -> None:
        raise KeyboardInterrupt


class _Runner:
    def __init__(self, command: str, as_json: bool) -> None:
        self._command = Command(command, output_to_stderr=as_json)
        self._as_json = as_json
        self.count = 0
        self.failed = 0

    def handle(self, message: ClaimedMessage, loop: Consumer) -> None:
        try:
            result = self._command.run(message)
        except Exception:
            loop.release()
            raise
        self.count += 1
        report: dict[str, object] = {
            "message_id": message.message_id,
            "exit_code": result.exit_code,
        }
        if result.exit_code:
            report |= {"outcome": "nacked", "error": result.error}
            settled = loop.nack(result.error)
        else:
            report |= {"outcome": "acked"}
            settled = loop.ack()
        if not settled:
            report |= {"outcome": "lease_lost"}
        self.failed += report["outcome"] != "acked"
        if self._as_json:
            print_json(report, line=True)

    def end(self) -> None:
        self._command.end()


@contextmanager
def _sink(path: Path | None, format: Format) -> Iterator[Callable[[StoredMessage], None]]:
    """A function that writes a message, and returns when that is done."""
    if path is None:
        yield lambda message: write_out(_line(message, format, safe=sys.stdout.isatty()))
        return
    with path.open("ab") as file:
        lasting = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        yield lambda message: _append(file, _line(message, format), lasting)


def _append(file: BinaryIO, line: bytes, lasting: bool) -> None:
    file.write(line)
    file.flush()
    if lasting:
        os.fsync(file.fileno())


def _line(message: StoredMessage, format: Format, *, safe: bool = False) -> bytes:
    payload = message.payload
    if format is Format.JSON:
        return json_line(message_as_json(message))
    if payload is None:
        payload = (message.payload_uri or "").encode()
    if format is Format.HEX:
        return payload.hex().encode() + b"\n"
    return (safe_text(payload).encode() if safe else payload) + b"\n"


# --- ending ---------------------------------------------------------------------------------------


class _Stop:
    """Ends a loop at SIGINT or SIGTERM: at once while it waits, else after the message in hand.

    A second one calls ``end``, to make short work of that message.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self.asked = False
        self._end = end
        self._busy = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        usual = [signal.signal(number, self._caught) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, usual, strict=True):
                signal.signal(number, handler)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """A message is in hand."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _caught(self, *_: object) -> None:
        if not self._busy:
            raise KeyboardInterrupt
        if self.asked:
            self._end()
            return
        self.asked = True
        note("ending after this message; Ctrl-C again gives it back")
