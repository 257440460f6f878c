"""The tables that can be read, and their columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from opendata_queue.model.errors import InvalidInputError
from opendata_queue.spark.options import names_of

MESSAGES: Final = "messages"

_TEXT, _LONG, _INT = StringType(), LongType(), IntegerType()
_TIME, _BOOL = TimestampType(), BooleanType()
_WAITING: Final[dict[str, DataType]] = {
    "queue": _TEXT,
    "message_id": _LONG,
    "priority": _INT,
    "attempts": _INT,
    "visible_at": _TIME,
    "expires_at": _TIME,
}
_PAYLOADS: Final[dict[str, DataType]] = {"payload": BinaryType(), "payload_uri": _TEXT}

TABLES: Final[dict[str, dict[str, DataType]]] = {
    MESSAGES: {
        "message_id": _LONG,
        "created_at": _TIME,
        "received_at": _TIME,
        "visible_at": _TIME,
        "retention_seconds": _LONG,
        "headers": MapType(_TEXT, _TEXT),
        **_PAYLOADS,
    },
    "queues": {
        "queue": _TEXT,
        "filter": _TEXT,
        "created_at": _TIME,
        "paused": _BOOL,
        "max_attempts": _INT,
        "lease_ms": _LONG,
        "max_lease_ms": _LONG,
        "backoff_ms": _LONG,
        "backoff_factor": DoubleType(),
        "max_backoff_ms": _LONG,
        "backoff_jitter": DoubleType(),
        "done_retention_seconds": _LONG,
        "failed_retention_seconds": _LONG,
        "max_in_flight": _INT,
        "relaxed_claims": _BOOL,
        "window": _INT,
        "bucket": _INT,
        "available": _LONG,
        "delayed": _LONG,
        "in_flight": _LONG,
        "done": _LONG,
        "failed": _LONG,
        "expired": _LONG,
    },
    "active": {
        "queue": _TEXT,
        "message_id": _LONG,
        "state": _TEXT,
        "priority": _INT,
        "attempts": _INT,
        "visible_at": _TIME,
        "expires_at": _TIME,
        "claimed_at": _TIME,
        "lease_deadline": _TIME,
    },
    "scheduled": _WAITING,
    "backlog": _WAITING,
    "done": {"queue": _TEXT, "message_id": _LONG, "done_at": _TIME, "attempts": _INT},
    "failed": {
        "queue": _TEXT,
        "message_id": _LONG,
        "failed_at": _TIME,
        "attempts": _INT,
        "priority": _INT,
        "consumer": _TEXT,
        "error": _TEXT,
        "expires_at": _TIME,
    },
    "attempts": {"message_id": _LONG, "consumers": ArrayType(_TEXT)},
}


def table_of(options: Mapping[str, str]) -> str:
    table = options.get("table", MESSAGES)
    if table not in TABLES:
        raise InvalidInputError(f"there is no table {table!r}; there are {', '.join(TABLES)}")
    return table


def schema_of(options: Mapping[str, str]) -> StructType:
    """The columns that were asked for; by default all, but payloads only with ``payloads``."""
    table = table_of(options)
    known = TABLES[table]
    chosen = names_of(options.get("columns"))
    for name in chosen:
        if name not in known:
            raise InvalidInputError(
                f"table {table} has no column {name!r}; it has {', '.join(known)}"
            )
    if not chosen:
        with_payloads = options.get("payloads", "false").lower() == "true"
        chosen = tuple(name for name in known if with_payloads or name not in _PAYLOADS)
    return StructType([StructField(name, known[name]) for name in chosen])


def check_schema(table: str, schema: StructType) -> None:
    """A schema that a user gives may choose columns, and change nothing about them."""
    known = TABLES[table]
    for field in schema.fields:
        wanted = known.get(field.name)
        if wanted is None:
            raise InvalidInputError(
                f"table {table} has no column {field.name!r}; it has {', '.join(known)}"
            )
        if field.dataType != wanted:
            raise InvalidInputError(
                f"column {field.name!r} of table {table} is {wanted.simpleString()}, "
                f"not {field.dataType.simpleString()}"
            )
