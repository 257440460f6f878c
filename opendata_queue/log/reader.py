"""Messages as one shard's database holds them: read by id, by its writer or by other processes."""

from __future__ import annotations

import asyncio

from odq_encodings import MetadataFields, UriPayload
from opendata_queue.log.metadata_log import MetadataLog
from opendata_queue.log.payloads import PayloadStore
from opendata_queue.model.allowance import Allowance, ReadStep
from opendata_queue.model.clock import Clock
from opendata_queue.model.messages import MessageFields
from opendata_queue.store import DatabaseReads, Objects


class StoredMessages:
    """The log and the payloads of one shard."""

    def __init__(
        self,
        database: DatabaseReads,
        objects: Objects,
        shard: int,
        clock: Clock,
        *,
        checked_blobs: bool = True,
    ) -> None:
        self.log = MetadataLog(database)
        self.payloads = PayloadStore(database, objects, shard, clock, checked=checked_blobs)

    async def read(
        self,
        message_ids: list[int],
        *,
        blobs: bool = True,
        allowance: Allowance | None = None,
        step: ReadStep | None = None,
    ) -> dict[int, MessageFields]:
        """Those of the messages that are there, expired or not.

        Without ``blobs`` only those whose payloads are inline. Of those that ``allowance`` does not
        admit, and of those behind them, some are left out; so is what a ``step`` has no bytes for,
        that of the allowance if it is not given.
        """
        if step is None and allowance is not None:
            step = allowance.step
        if not message_ids:
            return {}
        rows, payload_rows = (None, None) if step is None else (step.metadata, step.payloads)
        metadata, payloads = await asyncio.gather(
            self.log.read_fields(message_ids, rows),
            self.payloads.read_many(
                message_ids, blobs=blobs, allowance=allowance, budget=payload_rows
            ),
        )
        if metadata.keys() != payloads.keys():
            both = [one for one in metadata if one in payloads]
            metadata = {one: metadata[one] for one in both}
        return {one: stored_message(fields, payloads[one]) for one, fields in metadata.items()}


def unless_expired(message: MessageFields | None, now_ms: int) -> MessageFields | None:
    """A message, or none if its retention is over, whether or not its space is freed."""
    if message is None or not message.retention_seconds:
        return message
    deadline = message.received_at_ms + message.retention_seconds * 1000
    return None if now_ms > deadline else message


def stored_message(metadata: MetadataFields, payload: bytes | UriPayload) -> MessageFields:
    message_id, created_at, received_at, visible_at, retention_seconds, headers = metadata
    if payload.__class__ is bytes:
        data, uri = payload, None
    else:
        assert isinstance(payload, UriPayload)
        data, uri = None, payload.uri
    fields = (
        message_id, data, uri, headers, created_at, received_at, visible_at, retention_seconds
    )  # fmt: skip
    return tuple.__new__(MessageFields, fields)  # half the time of a call
