"""What the log of a system holds."""

from __future__ import annotations

from odq_encodings import MessageMetadata
from opendata_queue import (
    Engine,
)


async def log_of(system: Engine, from_sequence: int = 0) -> list[MessageMetadata]:
    return [entry async for chunk in system.scan_log(from_sequence) for entry in chunk]
