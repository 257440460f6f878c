"""The settings of a broker. Everything has a limit."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from opendata_queue.http.wire import MAX_BATCH
from opendata_queue.root.owner_files import DEFAULT_LEASE_MS
from opendata_queue.root.roles import Role

Positive = Annotated[int, Field(ge=1)]
Milliseconds = Annotated[int, Field(ge=1, le=3_600_000)]
Rate = Annotated[float, Field(gt=0)]


class ServerSettings(BaseModel):
    """Where a broker listens, whom it trusts, and how much it takes on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8080
    """0 takes a free one."""

    # --- who may do what ---

    jwt_key: str | None = Field(default=None, repr=False)
    """A shared secret (HS256), or a public key in PEM (RS256, ES256)."""
    jwt_audience: str | None = None
    jwt_issuer: str | None = None
    insecure: bool = False
    """Listen on other addresses than this machine's own without asking for tokens."""
    open_metrics: bool = False
    """Give ``/metrics`` to any client; otherwise, with tokens, it takes an administrator's."""

    # --- retention ---

    retention_interval_ms: Annotated[int, Field(ge=0, le=86_400_000)] = 60_000
    """How often what is past its time is removed; 0 for never."""
    erase_expired: bool = False
    """Delete the rows of expired messages at their deadline, one by one."""

    # --- limits ---

    max_body_bytes: Positive = 72 * 1024 * 1024
    max_answer_bytes: Positive = 64 * 1024 * 1024
    """Of messages in one answer, headers included; at least one is given all the same."""
    max_bodies_bytes: Positive = 256 * 1024 * 1024
    """Of all bodies together that are being read and worked on; one more gets a 503."""
    max_batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = MAX_BATCH
    """Messages, ids or receipts in one request."""
    max_wait_ms: Milliseconds = 30_000
    """How long a claim may wait; one that asks for more waits so long."""
    max_connections: Positive = 2_000
    header_timeout_ms: Milliseconds = 10_000
    """How long a client may take to send the head of a request, its first byte included."""
    body_timeout_ms: Milliseconds = 30_000
    """How long a client may pause within a body, and four times as long for all of it."""
    write_timeout_ms: Milliseconds = 30_000
    """How long a client may read nothing of an answer that waits for it."""
    max_unsent_bytes: Positive = 256 * 1024 * 1024
    """Of all answers together that are being made, or that clients have yet to read; no message is
    read for which there is no room, and the request for it gets a 503."""
    idle_timeout_ms: Milliseconds = 75_000
    """How long a connection is kept between requests."""
    max_topic_queues: Positive = 10_000
    """Queues of a namespace beyond which ``/enqueue`` and ``/dequeue`` make no more by themselves;
    without tokens, of all namespaces together."""
    max_metric_queues: Positive = 200
    """Queues whose depths ``/metrics`` shows, the first by name."""

    rate_per_second: Rate | None = None
    """Messages published and requests made in one namespace."""
    rate_burst: Positive = 1_000
    namespace_rates: dict[str, Rate] = Field(default_factory=dict)
    """Rates of namespaces that have one of their own."""

    # --- owning the root ---

    role: Role = Role.ALL
    """Whether to publish, to serve the queues, or both."""

    advertise: str | None = None
    """The URL at which others reach this broker; where it listens, unless set."""
    takeover: bool = False
    """Take the root from the process that serves it."""
    standby: bool = False
    """Wait until no process serves the root, and take it over then."""
    owner_lease_ms: Annotated[int, Field(ge=100, le=3_600_000)] = DEFAULT_LEASE_MS
    """After so long a silence a standby takes over."""

    # --- running ---

    linger_ms: Annotated[float, Field(ge=0, le=10_000)] = 0
    """How long each commit waits for company: latency for requests to the store."""

    shutdown_timeout_ms: Milliseconds = 30_000
    access_log: bool = False
    """Log one line of JSON for each request."""

    @property
    def uses_tokens(self) -> bool:
        return self.jwt_key is not None
