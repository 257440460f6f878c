"""What callers give to the operations, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opendata_queue.filters import Filter
from opendata_queue.model.checks import check_integer
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.ids import MAX_MESSAGE_ID
from opendata_queue.model.values import Start
from opendata_queue.queues.store import MAX_AT_ONCE
from opendata_queue.queues.views import given_filter
from opendata_queue.root.clock import RootClock
from opendata_queue.routing.replay import FROM_THE_BEGINNING_MS

MAX_FAILED_AT_ONCE: Final = 10_000


def check_count(name: str, count: int) -> None:
    """Refuse what can't be the number of messages of one answer."""
    check_integer(name, count, 1, MAX_AT_ONCE)


async def checked_failed(filter: str | None, after_id: int, limit: int) -> Filter | None:
    """The filter that ``failed`` is given, once all of its arguments are known to be good."""
    check_count("limit", limit)
    check_integer("after_id", after_id, -1, MAX_MESSAGE_ID)
    return None if filter is None else await given_filter(filter)


def check_ids(message_ids: Sequence[int]) -> None:
    for one in message_ids:
        check_integer("message_id", one, 0, MAX_MESSAGE_ID)


def check_choice(message_ids: Sequence[int], every: bool, filter: str | None) -> None:
    """One way to say which messages are meant, and no more: a slip must not mean all of them."""
    given = [bool(message_ids), bool(every), filter is not None]
    if sum(given) != 1:
        raise InvalidInputError(
            f"{sum(given)} choices of failed messages were given, not 1: give message ids, "
            "all=True or a filter"
        )
    if filter is not None and not filter.strip():
        raise InvalidInputError("filter is empty, which matches everything: say all=True")
    if len(message_ids) > MAX_FAILED_AT_ONCE:
        raise InvalidInputError(
            f"{len(message_ids)} message ids are over the limit of {MAX_FAILED_AT_ONCE} in one call"
        )
    check_ids(message_ids)


def replay_from(start: Start, clock: RootClock) -> int | None:
    """From when on what is in the log is for a new queue; none if nothing is."""
    if start == "now":
        return None
    if start == "beginning":
        return FROM_THE_BEGINNING_MS
    if not isinstance(start, int) or isinstance(start, bool):
        raise InvalidInputError(
            f"start is {start!r}, not 'now', 'beginning' or a time in milliseconds"
        )
    now, ahead_ms = clock.now_ms(), clock.ahead_for_callers_ms()
    if not FROM_THE_BEGINNING_MS <= start <= now - ahead_ms:
        raise InvalidInputError(
            f"start is {start}, which is no time of the past; now is {now - ahead_ms}"
        )
    return max(start + ahead_ms, FROM_THE_BEGINNING_MS)
