"""Loads ``encodings/golden``: fields become records, short forms are written out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import odq_encodings
from odq_encodings import Record

GOLDEN = Path(__file__).parents[2] / "encodings" / "golden"
RECORD_FILES = sorted(
    path
    for path in GOLDEN.glob("*.json")
    if path.stem not in {"journal", "journal_state", "refused", "terminated_bytes"}
)
_ELEMENTS = {
    "available": "AvailableMessage",
    "backlog": "BacklogCount",
    "in_flight": "InFlightMessage",
    "DoneMessages.messages": "DoneMessage",
    "FailedMessages.messages": "FailedMessage",
}
_TEXT_FIELDS = {
    "uri",
    "filter",
    "instance",
    "namespace",
    "idempotency_key",
    "consumer",
    "error",
    "job",
}


@dataclass(frozen=True, kw_only=True)
class Vector:
    """One record and its literal bytes."""

    name: str
    record: Record
    data: bytes


def record_type(name: str) -> type[Record]:
    found: type[Record] = getattr(odq_encodings, name)
    return found


def vectors() -> list[Vector]:
    """Every key and every value of every file, as a vector of its own."""
    return [
        Vector(
            name=f"{entry['name']}-{part}",
            record=_build(entry[f"{part}_record"], entry[f"{part}_fields"]),
            data=_data(entry[f"{part}_hex"]),
        )
        for path in RECORD_FILES
        for entry in json.loads(path.read_text())
        for part in ("key", "value")
    ]


def rows() -> list[tuple[str, bytes, bytes, Record, Record]]:
    """Every pair of key and value, with the records they hold."""
    return [
        (
            entry["name"],
            _data(entry["key_hex"]),
            _data(entry["value_hex"]),
            _build(entry["key_record"], entry["key_fields"]),
            _build(entry["value_record"], entry["value_fields"]),
        )
        for path in RECORD_FILES
        for entry in json.loads(path.read_text())
    ]


def refused() -> list[tuple[str, type[Record], bytes]]:
    return [
        (entry["name"], record_type(entry["record"]), _data(entry["hex"]))
        for entry in json.loads((GOLDEN / "refused.json").read_text())
    ]


def terminated_bytes() -> list[tuple[str, bytes, bytes]]:
    return [
        (entry["name"], _data(entry["raw_hex"]), _data(entry["encoded_hex"]))
        for entry in json.loads((GOLDEN / "terminated_bytes.json").read_text())
    ]


def _data(hexes: str | list[Any]) -> bytes:
    if isinstance(hexes, str):
        return bytes.fromhex(hexes)
    return b"".join(
        bytes.fromhex(part)
        if isinstance(part, str)
        else bytes.fromhex(part["hex"]) * part["repeat"]
        for part in hexes
    )


def _build(record: str, fields: dict[str, Any]) -> Record:
    values = {name: _value(record, name, _written_out(field)) for name, field in fields.items()}
    return record_type(record)(**values)


def _written_out(field: Any) -> Any:
    match field:
        case {"repeat": count, "hex": hexes}:
            return bytes.fromhex(hexes) * count
        case {"hex": hexes}:
            return bytes.fromhex(hexes)
        case {"repeat": count, "text": text}:
            return text * count
        case {"repeat": count, "item": item}:
            return [_written_out(item)] * count
        case list():
            return [_written_out(item) for item in field]
        case _:
            return field


def _value(record: str, name: str, field: Any) -> Any:
    element = _ELEMENTS.get(name) or _ELEMENTS.get(f"{record}.{name}")
    if element is not None:
        return _elements(element, field)
    if name == "headers":
        return tuple((key, value) for key, value in field)
    if name == "consumer_ids":
        return tuple(field)
    if isinstance(field, str) and name not in _TEXT_FIELDS:
        return int(field)
    return field


def _elements(element: str, items: list[dict[str, str]]) -> tuple[Record, ...]:
    # Long arrays repeat one object: each distinct one is built once.
    built: dict[int, Record] = {}
    for item in items:
        if id(item) not in built:
            built[id(item)] = _build(element, item)
    return tuple(built[id(item)] for item in items)
