"""Queues of one publisher: the order is exact, and so is what the compactor removes."""

from __future__ import annotations

from hypothesis import settings

from tests.queues.admin_rules import AdminRules
from tests.queues.consumer_rules import ConsumerRules


class Queues(AdminRules, ConsumerRules):
    """All messages are in one lane."""


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=32, stateful_step_count=60, deadline=None)
