"""Tests of your own code: a real store in memory, and a clock that you move by hand.

python examples/testing_with_a_manual_clock.py

With pytest, the functions below are tests as they are. While the clock stands still, a claim that
waits does so until there is a message; ``timeout_ms`` is real time.
"""

from __future__ import annotations

import opendata_queue
from opendata_queue import ClaimedMessage, QueueOptions, RetryLater
from opendata_queue.testing import ManualClock

HOUR_MS = 3_600_000


def send_reminder(message: ClaimedMessage) -> str:
    """What is to be tested."""
    if message.attempts == 1:
        raise RetryLater(delay_ms=HOUR_MS)
    return "sent"


def test_a_reminder_is_given_after_a_day() -> None:
    clock = ManualClock()
    with opendata_queue.open("memory:///reminders", clock=clock) as system:
        system.create_queue("reminders")
        system.publish(b"water the plants", delay_ms=24 * HOUR_MS)

        clock.advance_ms(24 * HOUR_MS - 1)
        assert system.claim("reminders") == []
        clock.advance_ms(1)
        (message,) = system.claim("reminders", wait_ms=1, timeout_ms=60_000)

        assert message.payload == b"water the plants"


def test_a_reminder_that_fails_is_retried_after_an_hour() -> None:
    clock = ManualClock()
    with opendata_queue.open("memory:///retries", clock=clock) as system:
        system.create_queue("reminders", options=QueueOptions(max_attempts=2))
        system.publish(b"call home")
        (message,) = system.claim("reminders", wait_ms=1, timeout_ms=60_000)
        try:
            send_reminder(message)
        except RetryLater as later:
            system.nack("reminders", message, error=str(later), delay_ms=later.delay_ms)

        clock.advance_ms(HOUR_MS)
        (message,) = system.claim("reminders", wait_ms=1, timeout_ms=60_000)

        assert send_reminder(message) == "sent"
        assert system.ack("reminders", message) == ["ok"]


def test_a_message_that_nobody_finishes_comes_back() -> None:
    clock = ManualClock()
    with opendata_queue.open("memory:///leases", clock=clock) as system:
        system.create_queue("jobs", options=QueueOptions(lease_ms=30_000, backoff_ms=0))
        system.publish(b"job")
        (first,) = system.claim("jobs", wait_ms=1, timeout_ms=60_000)

        clock.advance_ms(30_001)
        (second,) = system.claim("jobs", wait_ms=1, timeout_ms=60_000)

        assert second.attempts == 2
        assert system.ack("jobs", first) == ["lease_lost"]


if __name__ == "__main__":
    for test in (
        test_a_reminder_is_given_after_a_day,
        test_a_reminder_that_fails_is_retried_after_an_hour,
        test_a_message_that_nobody_finishes_comes_back,
    ):
        test()
        print(f"passed: {test.__name__}")
