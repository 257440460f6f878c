"""Claims, nacks and receipts with arguments that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_queue import (
    Engine,
    InvalidInputError,
)


@pytest.fixture
async def claimed(memory_system: Engine) -> str:
    """The receipt of a message in queue q."""
    await memory_system.create_queue("q")
    await memory_system.publish(b"x")
    (message,) = await memory_system.claim("q", wait_ms=1_000)
    return message.receipt


@pytest.mark.parametrize(
    "arguments",
    [
        {"delay_ms": 0.0},
        {"delay_ms": 1.5},
        {"delay_ms": 2**63},
        {"delay_ms": -1},
        {"delay_ms": "x"},
        {"error": None},
        {"error": b"x"},
    ],
    ids=str,
)
async def test_a_nack_with_bad_arguments_changes_nothing(
    memory_system: Engine, claimed: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(arguments))):
        await memory_system.nack("q", claimed, **arguments)

    assert (await memory_system.stats("q")).in_flight == 1
    assert await memory_system.ack("q", claimed) == ["ok"]


@pytest.mark.parametrize(
    "arguments",
    [{"consumer": "\ud800"}, {"consumer": 5}, {"wait_ms": "x"}, {"wait_ms": None}, {"count": 1.0}],
    ids=ascii,
)
async def test_a_claim_with_bad_arguments_claims_nothing(
    memory_system: Engine, arguments: dict[str, Any]
) -> None:
    await memory_system.create_queue("q")
    await memory_system.publish(b"x")
    await memory_system._tailer.caught_up()

    with pytest.raises(InvalidInputError, match=next(iter(arguments))):
        await memory_system.claim("q", **arguments)

    assert (await memory_system.stats("q")).available == 1


async def test_what_is_no_receipt_is_named(memory_system: Engine, claimed: str) -> None:
    bad: Any = [claimed]
    with pytest.raises(
        InvalidInputError, match="no receipt and no claimed message, but a list: give each"
    ):
        await memory_system.ack("q", bad)
