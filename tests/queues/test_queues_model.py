"""Queues of one publisher: the order is exact, and so is what the compactor removes."""

from __future__ import annotations

import tempfile

from hypothesis import settings

from opendata_queue import StoreSettings
from tests.queues.admin_rules import AdminRules
from tests.queues.consumer_rules import ConsumerRules


class Queues(AdminRules, ConsumerRules):
    """All messages are in one lane."""


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=32, stateful_step_count=60, deadline=None)


class QueuesOnFiles(AdminRules, ConsumerRules):
    """The same, in a folder whose journal is never flushed before it has to be (RFC 0011)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="queues-model-")
        self.url = f"file://{self.folder.name}/root"
        self.store_settings = StoreSettings(fsync=False, journal_ms=24 * 3_600_000)

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestQueuesOnFiles = QueuesOnFiles.TestCase
TestQueuesOnFiles.settings = settings(max_examples=16, stateful_step_count=50, deadline=None)
