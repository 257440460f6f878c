"""Whether a store keeps the promise that everything rests on: to create an object only once."""

from __future__ import annotations

import secrets

from opendata_queue.store import Objects


async def conditional_writes_work(objects: Objects) -> bool:
    """Really try: of two creates of one object the first must win, and its bytes must stay."""
    path = f"probe/{secrets.token_hex(16)}"
    first, second = secrets.token_bytes(32), secrets.token_bytes(32)
    try:
        won = await objects.create(path, first)
        won_again = await objects.create(path, second)
        return won and not won_again and await objects.read(path) == first
    finally:
        await objects.delete(path)
