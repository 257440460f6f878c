"""How a queue is configured, and how its options are stored (RFC 0001, RFC 0006)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

from odq_encodings import (
    BEING_DELETED,
    PAUSED,
    RELAXED_CLAIMS,
    QueueConfig,
    QueueOptionsRecord,
)
from opendata_queue.model.errors import InvalidInputError

FOR_EVER_MS: Final = -(1 << 63)
"""Before all times: what is kept since then is kept for ever."""

MAX_NAME_CHARACTERS: Final = 255

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_U32: Final = (1 << 32) - 1
_U16: Final = (1 << 16) - 1

_LIMITS: Final[dict[str, tuple[float, float]]] = {
    "max_attempts": (0, _U16),
    "done_retention_seconds": (0, _U32),
    "failed_retention_seconds": (0, _U32),
    "lease_ms": (1, _U32),
    "max_lease_ms": (1, _U32),
    "backoff_ms": (0, _U32),
    "max_backoff_ms": (0, _U32),
    "backoff_factor": (1, 655.35),
    "backoff_jitter": (0, 1),
    "window": (1, _U16),
    "max_in_flight": (1, _U16),
    "bucket": (1, 10_000),
}
_FRACTIONS: Final = frozenset({"backoff_factor", "backoff_jitter"})
_SWITCHES: Final = ("paused", "relaxed_claims")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueRules:
    """The options of a queue that its transitions depend on."""

    max_attempts: int = 0
    """0: no limit."""
    window: int = 256
    max_in_flight: int = 10_000
    bucket: int = 128
    backoff_ms: int = 1_000
    max_backoff_ms: int = 3_600_000
    backoff_factor: float = 2.0
    backoff_jitter: float = 0.2
    paused: bool = False

    def backoff(self, attempts: int, chance: float) -> int:
        """The delay after so many attempts; ``chance`` in [0, 1) spreads it by the jitter."""
        # The exponent is capped before it is used: 2.0 ** 65_535 is no number.
        exponent = min(max(0, attempts - 1), 64)
        delay = min(self.backoff_ms * self.backoff_factor**exponent, self.max_backoff_ms)
        return int(delay * (1 - self.backoff_jitter * chance))


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOptions:
    """How a queue treats its messages. Times are milliseconds unless the name says otherwise."""

    max_attempts: int = 5
    """Claims before a message fails for good; 0 means without limit."""

    lease_ms: int = 30_000
    """How long a claim is held, unless the consumer asks for something else."""

    max_lease_ms: int = 12 * 3_600_000
    """The longest that a consumer may ask for."""

    backoff_ms: int = 1_000
    """How long a message rests after its first failure."""

    backoff_factor: float = 2.0
    """By how much that grows with each further one."""

    max_backoff_ms: int = 3_600_000
    backoff_jitter: float = 0.2
    """The part of a back-off, from 0 to 1, by which chance may shorten it."""

    done_retention_seconds: int = 7 * 24 * 3_600
    """How long it is remembered that a message was done; 0 means for ever."""

    failed_retention_seconds: int = 0
    """How long failed messages are kept; 0 means for ever."""

    max_in_flight: int = 10_000
    """How many messages may be claimed at the same time."""

    relaxed_claims: bool = False
    """Hand messages out before the claim is durable.

    After a crash such a message may be delivered again while its first holder still works.
    """

    paused: bool = False
    """Whether claims get nothing."""

    window: int = 256
    """How many available messages are kept at hand. Every commit rewrites them: keep it small."""

    bucket: int = 128
    """How many done or failed messages make a bucket."""

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            _check_number(name, value)
            if not least <= value <= most:
                raise InvalidInputError(f"{name} is {value!r}, not within {least} to {most}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}, not true or false")
        # As they are stored, so that they are the same after a reopen.
        for name in ("backoff_factor", "backoff_jitter"):
            object.__setattr__(self, name, round(getattr(self, name), 2))
        if self.lease_ms > self.max_lease_ms:
            raise InvalidInputError(
                f"lease_ms {self.lease_ms} is over max_lease_ms {self.max_lease_ms}"
            )

    def with_changes(self, changes: Mapping[str, Any]) -> Self:
        """The same, but for those that ``changes`` names."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise InvalidInputError(
                    f"{name} is no option of a queue; there are {', '.join(sorted(known))}"
                )
        return replace(self, **changes)

    def done_since(self, now: int) -> int:
        """What was done before this time is past its retention (RFC 0010)."""
        return _since(self.done_retention_seconds, now)

    def failed_since(self, now: int) -> int:
        """What failed before this time is past its retention."""
        return _since(self.failed_retention_seconds, now)

    def rules(self) -> QueueRules:
        wanted = {field.name for field in fields(QueueRules)}
        return QueueRules(**{name: getattr(self, name) for name in wanted})

    def encode(self, created_at_ms: int, *, being_deleted: bool = False) -> bytes:
        flags = (
            PAUSED * self.paused
            | RELAXED_CLAIMS * self.relaxed_claims
            | BEING_DELETED * being_deleted
        )
        return QueueOptionsRecord(
            created_at=created_at_ms,
            lease_ms=self.lease_ms,
            max_lease_ms=self.max_lease_ms,
            backoff_ms=self.backoff_ms,
            max_backoff_ms=self.max_backoff_ms,
            backoff_factor=round(self.backoff_factor * 100),
            backoff_jitter=round(self.backoff_jitter * 100),
            window=self.window,
            max_in_flight=self.max_in_flight,
            bucket=self.bucket,
            failed_retention_seconds=self.failed_retention_seconds,
            flags=flags,
        ).encode()

    @classmethod
    def from_records(cls, config: QueueConfig, record: QueueOptionsRecord) -> QueueOptions:
        return cls(
            max_attempts=config.max_attempts,
            done_retention_seconds=config.done_retention_seconds,
            lease_ms=record.lease_ms,
            max_lease_ms=record.max_lease_ms,
            backoff_ms=record.backoff_ms,
            max_backoff_ms=record.max_backoff_ms,
            backoff_factor=record.backoff_factor / 100,
            backoff_jitter=record.backoff_jitter / 100,
            window=record.window,
            max_in_flight=record.max_in_flight,
            bucket=record.bucket,
            failed_retention_seconds=record.failed_retention_seconds,
            paused=bool(record.flags & PAUSED),
            relaxed_claims=bool(record.flags & RELAXED_CLAIMS),
        )


def _since(retention_seconds: int, now: int) -> int:
    return now - retention_seconds * 1_000 if retention_seconds else FOR_EVER_MS


def _check_number(name: str, value: object) -> None:
    kinds = (int, float) if name in _FRACTIONS else (int,)
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = "a number" if name in _FRACTIONS else "a whole number"
        raise InvalidInputError(f"{name} is {value!r}, not {wanted}")


def check_name(name: str) -> None:
    """Refuse what is no name of a queue."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS or not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name!r} is no queue name: use up to {MAX_NAME_CHARACTERS} letters, digits, '_', '.' "
            "and '-', in parts that are separated by '/' and don't start with '.' or '-'"
        )
