"""Errors on the wire: what a broker says of one, and the one that its client raises for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from opendata_queue.filters import FilterError
from opendata_queue.model.errors import (
    AccessProblem,
    ClosedError,
    CorruptStoreError,
    FencedError,
    FormatVersionError,
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
    WrongContextError,
)

MAX_ERROR_CHARS: Final = 4_000
"""Of the text of an error in an answer."""


class ErrorBody(Struct, kw_only=True, omit_defaults=True):
    """What went wrong: ``error`` is the name of the class that the client raises."""

    error: str
    message: str
    in_doubt: bool = False
    """Whether something was under way that may or may not have happened."""
    refused: bool = False
    """Whether nothing was tried at all, so that anything may be sent again later."""
    retry_after_ms: int | None = None
    reason: str | None = None
    line: int | None = None
    column: int | None = None
    address: str | None = None
    """Where to ask instead."""
    code: str | None = None
    """The ``AccessProblem`` of a ``StoreAccessError``; brokers of release 0.1 do not say it."""

    def __post_init__(self) -> None:
        if len(self.message) > MAX_ERROR_CHARS:  # much of what was sent may be repeated in it
            self.message = f"{self.message[:MAX_ERROR_CHARS]}…"


_ERRORS: Final[Mapping[str, type[OdqError]]] = {
    kind.__name__: kind
    for kind in (
        ClosedError,
        CorruptStoreError,
        FencedError,
        FormatVersionError,
        InvalidInputError,
        MessageExpiredError,
        QueueExistsError,
        QueueNotFoundError,
        ShardFullError,
        TimedOutError,
        WrongContextError,
    )
}


def body_of(error: OdqError) -> ErrorBody:
    """What a client is sent of an error."""
    body = ErrorBody(error=type(error).__name__, message=str(error))
    if isinstance(error, StoreUnavailableError):
        body.in_doubt = error.in_doubt
    if isinstance(error, StoreAccessError):
        body.code = error.problem
    if isinstance(error, OtherRoleError):
        body.address = error.address
    if isinstance(error, FilterError):
        body.reason, body.line, body.column = error.reason, error.line, error.column
    return body


def error_of(body: ErrorBody) -> OdqError:
    """The error that the broker has met, to be raised here."""
    if body.error == FilterError.__name__:
        return _filter_error(body)
    if body.error == OtherRoleError.__name__:
        return OtherRoleError(body.message, address=body.address)
    if body.error == StoreAccessError.__name__:
        known = {one.value: one for one in AccessProblem}
        return StoreAccessError(body.message, problem=known.get(body.code or ""))
    if body.error in _ERRORS:
        return _ERRORS[body.error](body.message)
    return StoreUnavailableError(body.message, in_doubt=body.in_doubt)


def _filter_error(body: ErrorBody) -> FilterError:
    """As it was made; the text that its message points into is not here to make it again."""
    error = FilterError(body.reason or body.message)
    error.args = (body.message,)
    error.line, error.column = body.line or 1, body.column or 1
    return error
