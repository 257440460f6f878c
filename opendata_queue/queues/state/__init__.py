"""The state of one queue, without I/O and without a clock: ``state.py`` has the rules."""

from opendata_queue.queues.state.ready import Ready
from opendata_queue.queues.state.records import (
    BacklogChanges,
    Changes,
    Claim,
    FinishedChanges,
    Held,
    ScheduleChanges,
    Waiting,
    in_order,
    new_tuple,
)
from opendata_queue.queues.state.schedule import Schedule
from opendata_queue.queues.state.state import LEASE_OVER, TRANSITIONS, QueueState, Where

__all__ = [
    "LEASE_OVER",
    "TRANSITIONS",
    "BacklogChanges",
    "Changes",
    "Claim",
    "FinishedChanges",
    "Held",
    "QueueState",
    "Ready",
    "Schedule",
    "ScheduleChanges",
    "Waiting",
    "Where",
    "in_order",
    "new_tuple",
]
