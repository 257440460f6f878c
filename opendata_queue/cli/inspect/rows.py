"""``odq inspect``: what the bytes of a row mean, field by field.

The commands that read rows of a root are in ``inspect.root``.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import odq_encodings
from odq_encodings import (
    InspectedField,
    Inspection,
    PayloadKind,
    Record,
    inspect_key,
    inspect_record,
    inspect_row,
)
from opendata_queue.model.ids import sequence_of, shard_of
from opendata_queue.model.safe_text import harmless

app = typer.Typer(
    help="Decode rows, given as hex or read from a root, into their fields.",
    no_args_is_help=True,
)

_SHOWN_FIELDS: Final = 120
_SHOWN_BYTES: Final = 16
_SHOWN_CHARACTERS: Final = 80
# A narrower terminal gets bytes without spaces, and then lines instead of a table.
_WIDE_COLUMNS: Final = 100
_TABLE_COLUMNS: Final = 60
_PAYLOAD_KINDS: Final[dict[int, str]] = {
    PayloadKind.INLINE: "inline bytes",
    PayloadKind.URI: "URI",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RECORDS: Final[dict[str, type[Record]]] = {
    name: found
    for name in odq_encodings.__all__
    if isinstance(found := getattr(odq_encodings, name), type)
    and issubclass(found, Record)
    and found is not Record
}

HexKey = Annotated[str, typer.Argument(help="The row's key in hex, or - for standard input.")]
HexValue = Annotated[str, typer.Argument(help="The row's value in hex, or - for standard input.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ShowAll = Annotated[
    bool, typer.Option("--all", help=f"Show every field, not just the first {_SHOWN_FIELDS}.")
]


@app.command("hex")
def inspect_hex(
    key: HexKey, value: HexValue, as_json: AsJson = False, show_all: ShowAll = False
) -> None:
    """Decode a row: its key says what the value is.

    Exits with 1 if the row is broken, and says where.

    Example: odq inspect hex 01010000000000000102 0102006869
    """
    if key == value == "-":
        raise typer.BadParameter("only one of KEY and VALUE can be -, for there is one input")
    _show(inspect_row(bytes_of(key, "KEY"), bytes_of(value, "VALUE")), as_json, show_all)


@app.command("key")
def inspect_only_key(key: HexKey, as_json: AsJson = False, show_all: ShowAll = False) -> None:
    """Decode a key alone.

    Example: odq inspect key 01026f726465727300
    """
    _show((inspect_key(bytes_of(key, "KEY")),), as_json, show_all)


@app.command("value")
def inspect_only_value(
    record: Annotated[str, typer.Argument(help="What it is, for example MessageMetadata.")],
    value: HexValue,
    as_json: AsJson = False,
    show_all: ShowAll = False,
) -> None:
    """Decode a value (or a key, or one element of an array) whose record is known.

    Example: odq inspect value DoneMessage 010000000000000002000000000000000300
    """
    if record not in _RECORDS:
        known = ", ".join(sorted(_RECORDS))
        raise typer.BadParameter(f"{record!r} is not one of: {known}", param_hint="RECORD")
    _show((inspect_record(_RECORDS[record], bytes_of(value, "VALUE")),), as_json, show_all)


def bytes_of(text: str, name: str) -> bytes:
    """Hex as people paste it: with spaces, commas, colons, underscores, dots, or 0x in front."""
    if text == "-":
        text = _standard_input(name)
    groups = re.split(r"[\s,:_·\ufeff]+", text)
    digits = "".join(group.removeprefix("0x").removeprefix("0X") for group in groups)
    wrong = re.search(r"[^0-9a-fA-F]", digits)
    if wrong:
        place = f"{wrong.group()!r} is no hex digit (digit {wrong.start() + 1})"
        raise typer.BadParameter(place, param_hint=name)
    if len(digits) % 2:
        raise typer.BadParameter(
            f"{len(digits)} hex digits are an odd number; a byte has two", param_hint=name
        )
    return bytes.fromhex(digits)


def _standard_input(name: str) -> str:
    if sys.stdin is None:
        raise typer.BadParameter("standard input is closed", param_hint=name)
    return sys.stdin.buffer.read().decode(errors="replace")


def _show(inspections: tuple[Inspection, ...], as_json: bool, show_all: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps([inspection_as_json(inspection) for inspection in inspections], indent=2)
        )
    else:
        console = Console()
        for inspection in inspections:
            print_inspection(console, inspection, show_all)
    if any(inspection.error for inspection in inspections):
        raise typer.Exit(1)


def print_inspection(console: Console, inspection: Inspection, show_all: bool) -> None:
    fields = inspection.fields if show_all else inspection.fields[:_SHOWN_FIELDS]
    left = len(inspection.fields) - len(fields)
    if console.width < _TABLE_COLUMNS or len(fields) > _SHOWN_FIELDS:
        _print_lines(inspection, fields)
    elif fields:
        console.print(_table(inspection, fields, wide=console.width >= _WIDE_COLUMNS))
    if left:
        console.print(f"… and {left} more fields; --all shows them")
    if inspection.error:
        console.print(Text(f"✗ broken: {harmless(str(inspection.error))}", style="bold red"))


def _print_lines(inspection: Inspection, fields: tuple[InspectedField, ...]) -> None:
    """A line for each field, printed as it is made: a table is laid out as a whole."""
    print(inspection.record)
    for field in fields:
        meaning = _meaning(field, inspection)
        note = f" ({meaning})" if meaning else ""
        where = f"{field.offset}  {field.name} {field.type_name}"
        print(f"{where}  {_hex(field.data)} = {_value(field)}{note}")


def _table(inspection: Inspection, fields: tuple[InspectedField, ...], *, wide: bool) -> Table:
    table = Table(
        title=inspection.record,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("at", justify="right", style="cyan", no_wrap=True)
    table.add_column("bytes", style="dim", overflow="fold", max_width=None if wide else 8)
    table.add_column("field", overflow="fold")
    table.add_column("type", style="magenta", no_wrap=True)
    table.add_column("value", overflow="fold")
    meanings = [_meaning(field, inspection) for field in fields]
    if any(meanings):
        table.add_column("meaning", style="green", no_wrap=True, overflow="fold")
    for field, meaning in zip(fields, meanings, strict=True):
        shown_bytes = _hex(field.data, " " if wide else "")
        cells = [str(field.offset), shown_bytes, field.name, field.type_name, _value(field)]
        table.add_row(*map(Text, [*cells, meaning][: len(table.columns)]))
    return table


def inspection_as_json(inspection: Inspection) -> dict[str, object]:
    error = inspection.error
    return {
        "record": inspection.record,
        "fields": [
            {
                "offset": field.offset,
                "hex": field.data.hex(),
                "name": field.name,
                "type": field.type_name,
                # Decimal strings: 64-bit numbers do not survive every JSON reader.
                "value": field.value.hex() if isinstance(field.value, bytes) else str(field.value),
                "meaning": _meaning(field, inspection),
            }
            for field in inspection.fields
        ],
        "error": None
        if error is None
        else {"reason": error.reason, "field": error.field, "offset": error.offset},
    }


def _hex(data: bytes, between: str = " ") -> str:
    shown = data[:_SHOWN_BYTES].hex(between) if between else data[:_SHOWN_BYTES].hex()
    return shown if len(data) <= _SHOWN_BYTES else f"{shown} … ({len(data)} bytes)"


def _value(field: InspectedField) -> str:
    if isinstance(field.value, int):
        return str(field.value)
    text = repr(field.value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _meaning(field: InspectedField, inspection: Inspection) -> str:
    """What a person would want to know beyond the number."""
    name, value = field.name.rpartition(".")[2], field.value
    if not isinstance(value, int):
        return ""
    if name.endswith(("_at", "_deadline")):
        return "never" if name == "retention_deadline" and value == 0 else _time(value)
    if name.endswith("_seconds"):
        return "for ever" if value == 0 else str(timedelta(seconds=value))
    if name == "message_id":
        return f"shard {shard_of(value)}, sequence {sequence_of(value)}"
    if name == "type":
        return inspection.title
    if name == "kind":
        return _PAYLOAD_KINDS.get(value, "")
    return ""


def _time(milliseconds: int) -> str:
    try:
        moment = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return "beyond the calendar"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
