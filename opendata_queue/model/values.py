"""What a system says about queues and their messages, and what calls of it may be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from opendata_queue.model.options import QueueOptions

Start = Literal["now", "beginning"] | int
"""Where a new queue begins: a time is in milliseconds since the Unix epoch."""

Outcome = Literal["ok", "lease_lost"]
"""What became of one receipt: it was valid, or the message is not yours any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueInfo:
    """How a queue is configured."""

    name: str
    filter: str
    options: QueueOptions
    created_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStats:
    """How many messages of a queue are where.

    ``oldest_age_ms`` is for how long the available message with the smallest id has been there
    to be claimed: since it was received, or since its delay ended. Going through retries does
    not make it younger. It is none when nothing is available. In a queue with more than 32
    priorities behind its window it may be that of the second oldest.
    """

    available: int
    delayed: int
    in_flight: int
    done: int
    failed: int
    expired: int
    oldest_age_ms: int | None = None
    replaying: int = 0
    """How much of the log is still to be read, for a queue that begins in the past."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedMessage:
    """A message that was given up, and why.

    ``headers`` are none when the message itself is gone from the store, its retention over.
    """

    message_id: int
    failed_at_ms: int
    attempts: int
    priority: int
    consumer: str
    error: str
    headers: tuple[tuple[str, str], ...]


BrowsedState = Literal["available", "delayed", "in_flight", "done", "failed"]
"""Where a message of a queue can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueEntry:
    """A message as one queue sees it. What its state does not have is none.

    | state | has |
    |---|---|
    | ``available``, ``delayed`` | ``visible_at_ms``: from when on it can be claimed |
    | ``in_flight`` | ``claimed_at_ms``, ``lease_deadline_ms``, ``consumer`` |
    | ``done`` | ``finished_at_ms``; its priority is forgotten |
    | ``failed`` | ``finished_at_ms``, ``consumer`` (the last one), ``error`` |
    | ``unknown`` | nothing: it could not be found with bounded work (see ``history``) |

    ``attempts`` counts the claims in this queue. The consumer of a message in flight is not known
    any more after the root was opened anew. ``expires_at_ms`` is when its retention ends, where
    it ends and that is known. A message past that time is counted until the owner comes across it.
    """

    queue: str
    message_id: int
    state: BrowsedState | Literal["unknown"]
    priority: int | None = None
    attempts: int | None = None
    visible_at_ms: int | None = None
    claimed_at_ms: int | None = None
    lease_deadline_ms: int | None = None
    consumer: str | None = None
    finished_at_ms: int | None = None
    error: str | None = None
    expires_at_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuePage:
    """Some entries of a queue, and what to give as ``after`` for those behind them."""

    entries: tuple[QueueEntry, ...]
    next: str | None
    """None on the last page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundEntry(QueueEntry):
    """An entry with the headers of its message; none of them when the message itself is gone."""

    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPage:
    """Entries that were found, how many were examined for them, and how to go on."""

    entries: tuple[FoundEntry, ...]
    next: str | None
    """What to give as ``after`` for the next page; none at the end, and only there."""
    examined: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageHistory:
    """What is known of a message, over all queues. Its payload is had with ``read``."""

    message_id: int
    headers: tuple[tuple[str, str], ...]
    created_at_ms: int
    received_at_ms: int
    visible_at_ms: int
    retention_seconds: int
    consumers: tuple[str, ...]
    """Who has claimed it, in their order, whichever queue it was.

    To a token that is not for all namespaces a broker shows those alone who hold it, or have failed
    with it, in a queue of the token's."""
    entries: tuple[QueueEntry, ...]
    """Where it is in each queue that was found to hold it."""
    queues_left_out: int
    """How many queues were left out, since there are too many."""
