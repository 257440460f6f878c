"""Answers that say no."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opendata_queue.http.errors import ErrorBody, body_of
from opendata_queue.model.errors import (
    AccessProblem,
    ClosedError,
    FencedError,
    InvalidInputError,
    MessageExpiredError,
    OdqError,
    OtherRoleError,
    QueueExistsError,
    QueueNotFoundError,
    ShardFullError,
    StoreAccessError,
    StoreUnavailableError,
    TimedOutError,
)

_STATUS: Final[Mapping[type[OdqError], int]] = {
    InvalidInputError: 400,
    QueueNotFoundError: 404,
    QueueExistsError: 409,
    MessageExpiredError: 410,
    OtherRoleError: 421,
    StoreUnavailableError: 503,
    StoreAccessError: 503,
    FencedError: 503,
    ClosedError: 503,
    TimedOutError: 503,
    ShardFullError: 507,
}


_RETRY_AFTER_MS: Final = 1_000


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, body: ErrorBody, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(body.message)
        self.status = status
        self.body = body
        self.headers = dict(headers or {})
        if body.retry_after_ms is not None:
            # Whole seconds, rounded up, so that no client comes back too early.
            self.headers["Retry-After"] = str(-(-body.retry_after_ms // 1000))


def refusal_of(error: OdqError) -> Refusal:
    """The answer to a client for an error of the system."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    return Refusal(status, body_of(error))


def invalid(message: str, status: int = 400) -> Refusal:
    return Refusal(status, ErrorBody(error=InvalidInputError.__name__, message=message))


def unauthorized(message: str) -> Refusal:
    body = ErrorBody(error=StoreAccessError.__name__, message=message, refused=True)
    return Refusal(401, body, headers={"WWW-Authenticate": "Bearer"})


def forbidden(message: str) -> Refusal:
    body = body_of(StoreAccessError(message, problem=AccessProblem.FORBIDDEN))
    body.refused = True
    return Refusal(403, body)


def no_room_to_answer() -> Refusal:
    return come_back(503, "clients have yet to read what they were sent", _RETRY_AFTER_MS)


def come_back(status: int, message: str, retry_after_ms: int) -> Refusal:
    """Nothing was tried: the same may be sent again later."""
    body = ErrorBody(
        error=StoreUnavailableError.__name__,
        message=message,
        refused=True,
        retry_after_ms=retry_after_ms,
    )
    return Refusal(status, body)
