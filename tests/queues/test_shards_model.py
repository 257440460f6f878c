"""Queues of several publishers and bulk jobs: lanes take turns, and all else is as in one."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from odq_compactor import IngestRetention
from opendata_queue import NewMessage, QueueStats
from opendata_queue.systems.ingest import Ingest
from tests.queues.admin_rules import AdminRules
from tests.queues.consumer_rules import ConsumerRules
from tests.queues.queue_model import QueueModel, batches
from tests.queues.queues_machine import COMPACTOR
from tests.support.bulk_jobs import commit, write_shard

PUBLISHERS = 2


class Shards(AdminRules, ConsumerRules):
    """Messages are in the lanes of the owner, of publishers beside it, and of bulk jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.ingests: list[Ingest] = []
        self.jobs = itertools.count()
        self.is_news = False
        """Whether something was published elsewhere that need not be routed yet."""

    async def caught_up(self) -> None:
        if self.is_news:
            await self.system.all_is_routed()
            await self.system._following.bulk.finished()
            self.is_news = False
        await super().caught_up()

    def take_over(self, closing: bool) -> None:
        super().take_over(closing)
        self.is_news = True  # the next owner has to find out about all shards

    def steady_stats(self, queue: QueueModel) -> QueueStats:
        # Of several lanes only the first ones are looked at for the oldest, whichever these are.
        return dataclasses.replace(super().steady_stats(queue), oldest_age_ms=None)

    @precondition(lambda self: len(self.ingests) < PUBLISHERS)
    @rule()
    def publisher_comes(self) -> None:
        self.ingests.append(self.run(Ingest.open(self.url, clock=self.clock)))

    @precondition(lambda self: self.ingests)
    @rule(number=st.integers(0, PUBLISHERS - 1))
    def publisher_goes(self, number: int) -> None:
        """Whoever comes next goes on with its shard."""
        self.run(self.ingests.pop(number % len(self.ingests)).close())

    @precondition(lambda self: self.ingests)
    @rule(number=st.integers(0, PUBLISHERS - 1), batch=batches)
    def publish_elsewhere(self, number: int, batch: list[NewMessage]) -> None:
        batch = self.with_payloads(batch)
        ingest = self.ingests[number % len(self.ingests)]
        self.is_news = True
        self.learn(batch, self.run(ingest.publish_many(batch)))

    def publish_somewhere(self, batch: list[NewMessage]) -> None:
        if self.ingests:
            self.publish_elsewhere(0, batch)
        else:
            self.publish(batch)

    @rule(shards=st.lists(batches, min_size=1, max_size=2))
    def append_in_bulk(self, shards: list[list[NewMessage]]) -> None:
        batches = [self.with_payloads(batch) for batch in shards]
        job = f"job-{next(self.jobs)}"

        async def append() -> list[int]:
            written = [
                await write_shard(self.url, batch, job=job, clock=self.clock) for batch in batches
            ]
            await commit(self.url, job, written, now_ms=self.now)
            return [one.shard for one in written]

        self.is_news = True
        for batch, shard in zip(batches, self.run(append()), strict=True):
            self.learn(batch, range(shard << 32, (shard << 32) + len(batch)))
        self.run(self.caught_up())

    async def passes(self) -> None:
        """Each publisher looks after its own shard."""
        await super().passes()
        for ingest in self.ingests:
            await IngestRetention(ingest, COMPACTOR).run_once(thorough=True)
        await self.system.all_is_routed()  # what they have removed is seen from now on

    def teardown(self) -> None:
        for ingest in self.ingests:
            self.run(ingest.close())
        super().teardown()


TestShards = Shards.TestCase
TestShards.settings = settings(max_examples=22, stateful_step_count=50, deadline=None)
