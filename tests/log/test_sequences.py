"""Sequence numbers: never twice, never before their block is durable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odq_encodings import SeqBlock
from opendata_queue import ShardFullError
from opendata_queue.log.sequences import BLOCK_SIZE, Sequences
from opendata_queue.model.ids import SHARD_SEQUENCES

steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 3 * BLOCK_SIZE)),
        st.tuples(st.just("ahead"), st.just(0)),
        st.tuples(st.just("crash"), st.booleans()),
    ),
    max_size=60,
)


@given(steps=steps)
def test_numbers_only_grow_and_are_covered_by_a_durable_block(
    steps: list[tuple[str, int]],
) -> None:
    stored: SeqBlock | None = None
    sequences = Sequences(stored)
    last = -1
    for step, argument in steps:
        if step == "take":
            if sequences.available < argument:
                stored = sequences.next_block(argument)
                sequences.block_is_durable(stored)
            first = sequences.take(argument)
            assert first > last
            last = first + argument - 1
            assert stored is not None
            assert last < stored.end
        elif step == "ahead" and sequences.running_low:
            stored = sequences.next_block()
            sequences.block_is_durable(stored)
        elif step == "crash":
            if argument:  # a block was on its way, and whether it arrived is a matter of luck
                stored = sequences.next_block()
            sequences = Sequences(stored)


def test_a_block_has_4096_numbers_and_more_if_more_are_needed() -> None:
    sequences = Sequences(None)

    assert sequences.next_block() == SeqBlock(base_sequence=0, block_size=4_096)
    assert sequences.next_block(10_000) == SeqBlock(base_sequence=4_096, block_size=5_904)


def test_numbers_of_a_block_that_is_not_durable_can_not_be_taken() -> None:
    sequences = Sequences(None)
    block = sequences.next_block()

    with pytest.raises(AssertionError, match="1 sequences taken, 0 available"):
        sequences.take(1)

    sequences.block_is_durable(block)
    assert sequences.take(1) == 0


def test_the_next_block_is_wanted_once_when_less_than_half_is_left() -> None:
    sequences = Sequences(None)
    sequences.block_is_durable(sequences.next_block())
    sequences.take(BLOCK_SIZE // 2)
    assert not sequences.running_low

    sequences.take(1)
    assert sequences.running_low

    sequences.next_block()
    assert not sequences.running_low


def test_a_shard_ends_at_its_last_number() -> None:
    sequences = Sequences(SeqBlock(base_sequence=0, block_size=SHARD_SEQUENCES - 100))

    block = sequences.next_block(100)
    sequences.block_is_durable(block)

    assert block.end == SHARD_SEQUENCES
    assert sequences.take(100) == SHARD_SEQUENCES - 100
    with pytest.raises(ShardFullError, match="given out 4294967296 of 4294967296"):
        sequences.next_block(1)


def test_the_last_block_asks_for_no_other() -> None:
    sequences = Sequences(SeqBlock(base_sequence=0, block_size=SHARD_SEQUENCES - 100))
    sequences.block_is_durable(sequences.next_block(100))

    assert not sequences.running_low


def test_more_than_a_shard_has_left_is_refused() -> None:
    sequences = Sequences(SeqBlock(base_sequence=0, block_size=SHARD_SEQUENCES - 100))

    with pytest.raises(ShardFullError):
        sequences.next_block(101)
