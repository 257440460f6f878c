"""How a client reaches its broker."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from opendata_queue.model.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """How a client reaches its broker. Times are milliseconds."""

    token: str | None = None
    hosts: Sequence[str] | None = None
    """Hosts that may get the token in addition to the broker's own, if a root or a broker says that
    it is served elsewhere: names, ``*.domain``, addresses and networks (``10.0.0.0/8``)."""
    connections: int = 256
    """At the same time; a claim that waits takes one."""
    connect_timeout_ms: int = 5_000
    request_timeout_ms: int = 60_000
    """For an answer, in addition to the time that a claim may wait."""
    attempts: int = 14
    """How often something is tried that may be repeated: by default for some 30 seconds, in which
    another broker may take over. Opening gives up sooner."""
    backoff_ms: int = 100
    """The pause before the second attempt, doubled for each further one, with jitter."""
    max_backoff_ms: int = 5_000
    poll_ms: int = 20_000
    """How long one request waits; a longer claim makes several."""
    repeat_publishes: bool = True
    """Give messages without an idempotency key one, so that a publish may be repeated."""
    repeat_claims: bool = False
    """Claim again when an answer was lost; what it held comes back when its leases end. Consumers
    and workers do so anyway, to outlive a broker that crashes."""
    tls: ssl.SSLContext | None = None
    """For a broker whose certificate the machine does not trust by itself."""

    def __repr__(self) -> str:
        return "ClientOptions(…)"  # a token must not reach a log

    def __post_init__(self) -> None:
        for name in (
            *("connections", "connect_timeout_ms", "request_timeout_ms", "attempts"),
            *("backoff_ms", "max_backoff_ms", "poll_ms"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidInputError(f"{name} is {value!r}, not 1 or more")
