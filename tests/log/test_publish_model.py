"""A state machine: publishing, crashing and reopening against a simple model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from opendata_queue import Engine, NewMessage, PublishOptions
from opendata_queue.store import forget_memory_root
from opendata_queue.testing import ManualClock

T = TypeVar("T")

WINDOW_SECONDS = 100
_numbers = itertools.count()

keys = st.none() | st.sampled_from(["a", "b", "c"])
namespaces = st.sampled_from(["", "x"])
payloads = st.binary(max_size=40)
messages = st.builds(
    lambda payload, key, namespace, delay: NewMessage(
        payload,
        headers={"namespace": namespace} if namespace else {},
        idempotency_key=key,
        delay_ms=delay,
    ),
    payload=payloads,
    key=keys,
    namespace=namespaces,
    delay=st.none() | st.integers(0, 10_000),
)


class Publishing(RuleBasedStateMachine):
    """Every acknowledged message is there, unchanged and once, in the order of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.url = f"memory:///model-{next(_numbers)}"
        self.stored: dict[int, NewMessage] = {}
        self.received: dict[int, int] = {}
        self.known_keys: dict[tuple[str, str], tuple[int, int]] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        self.open()

    def open(self, *, takeover: bool = False) -> None:
        options = PublishOptions(
            inline_bytes=20, idempotency_window_seconds=WINDOW_SECONDS, recent_bytes=1_200
        )
        self.system = self.run(
            Engine.open(self.url, clock=self.clock, options=options, takeover=takeover)
        )

    @rule(batch=st.lists(messages, max_size=5))
    def publish_many(self, batch: list[NewMessage]) -> None:
        self.learn(batch, self.run(self.system.publish_many(batch)))

    @rule(batches=st.lists(st.lists(messages, min_size=1, max_size=3), min_size=2, max_size=4))
    def publish_at_once(self, batches: list[list[NewMessage]]) -> None:
        async def publish() -> list[list[int]]:
            return await asyncio.gather(*(self.system.publish_many(batch) for batch in batches))

        by_id: dict[int, list[NewMessage]] = {}
        for batch, ids in zip(batches, self.run(publish()), strict=True):
            for message, message_id in zip(batch, ids, strict=True):
                known = self.known_id(message)
                assert known is None or message_id == known
                by_id.setdefault(message_id, []).append(message)
        for message_id, contenders in by_id.items():
            if message_id not in self.stored:
                self.remember(self.the_one_stored(message_id, contenders), message_id)

    @rule(seconds=st.sampled_from([1, WINDOW_SECONDS, WINDOW_SECONDS + 1]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance_ms(seconds * 1_000)

    @rule()
    def reopen(self) -> None:
        self.run(self.system.close())
        self.open()

    @rule()
    def lose_all_memory(self) -> None:
        """Another owner takes over; the old one never gets to close."""
        lost = self.system
        self.open(takeover=True)
        self.run(lost.close())

    @precondition(lambda self: hasattr(self, "system"))
    @invariant()
    def the_log_is_the_model(self) -> None:
        async def entries() -> list[int]:
            return [e.message_id async for chunk in self.system.scan_log() for e in chunk]

        assert self.run(entries()) == sorted(self.stored)
        found = self.run(self.system.read_many(self.stored))
        for message_id, stored in zip(self.stored, found, strict=True):
            expected = self.stored[message_id]
            assert stored is not None
            assert stored.payload == expected.payload
            assert dict(stored.headers) == expected.headers
            assert stored.visible_at_ms == stored.received_at_ms + (expected.delay_ms or 0)

    def the_one_stored(self, message_id: int, contenders: list[NewMessage]) -> NewMessage:
        """Of messages that were published at once with one key, whichever came first is stored."""
        keys = {self.scoped(message) for message in contenders}
        assert len(contenders) == 1 or (len(keys) == 1 and contenders[0].idempotency_key)
        stored = self.run(self.system.read(message_id))
        assert stored is not None
        delay = stored.visible_at_ms - stored.received_at_ms
        return next(
            message
            for message in contenders
            if (message.payload, message.delay_ms or 0) == (stored.payload, delay)
        )

    def learn(self, batch: list[NewMessage], ids: list[int]) -> None:
        for message, message_id in zip(batch, ids, strict=True):
            known = self.known_id(message)
            if known is not None:
                assert message_id == known
                continue
            assert message_id > max(self.stored, default=-1), "an id was given out twice"
            self.remember(message, message_id)

    def known_id(self, message: NewMessage) -> int | None:
        if message.idempotency_key is None:
            return None
        known = self.known_keys.get(self.scoped(message))
        if known is None or self.clock.now_ms() > known[1]:
            return None
        return known[0]

    def remember(self, message: NewMessage, message_id: int) -> None:
        self.stored[message_id] = message
        if message.idempotency_key is not None:
            expires = self.clock.now_ms() + WINDOW_SECONDS * 1_000
            self.known_keys[self.scoped(message)] = message_id, expires

    @staticmethod
    def scoped(message: NewMessage) -> tuple[str, str]:
        return message.headers.get("namespace", ""), message.idempotency_key or ""

    def teardown(self) -> None:
        if hasattr(self, "system"):
            self.run(self.system.close())
        self.runner.close()
        forget_memory_root(self.url)


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
