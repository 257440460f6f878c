"""What can go wrong, one class for each thing that a caller can do about it."""

from __future__ import annotations

from enum import StrEnum


class OdqError(Exception):
    """Base of all errors that this package raises on purpose."""


class InvalidInputError(OdqError, ValueError):
    """The call's arguments can't be stored: fix the input. Nothing was written."""


class AccessProblem(StrEnum):
    """What keeps a root from being used, where code decides by it. Brokers send these values."""

    FORBIDDEN = "forbidden"
    """The broker knows the token, which does not allow this."""
    NO_BUCKET = "no_bucket"
    NO_DATABASE = "no_database"
    """There is a root, and nothing was written to this part of it, or it was removed."""


class StoreAccessError(OdqError):
    """The root can't be used as configured: fix the URL, bucket, credentials or permissions.

    ``problem`` says what it is, where that makes a difference to code.
    """

    def __init__(self, message: str, *, problem: AccessProblem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class StoreUnavailableError(OdqError):
    """The store did not answer, or not in time: try a read again; after a write, open again.

    ``in_doubt`` is true when a write was under way and may or may not have become durable. The
    engine never guesses: it stops, says so to all who come later, and the next open finds out.
    """

    def __init__(self, message: str, *, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


class FencedError(OdqError):
    """Another process has taken this root over: stop using this one, reopen if it should be yours.

    All that was acknowledged before is safe in the store. What was under way may be there or not.
    """


class OwnedError(OdqError):
    """Another process serves this root: use that one, stop it, or open with ``takeover=True``.

    ``host``, ``pid``, ``name`` and ``address`` say who it is; ``address`` is the URL to connect to,
    if it has one. Nothing was changed. With ``takeover=True`` the other's calls raise
    ``FencedError`` from then on.
    """

    def __init__(
        self,
        message: str,
        *,
        host: str | None = None,
        pid: int | None = None,
        name: str | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid
        self.name = name
        self.address = address


class ClosedError(OdqError):
    """It was closed, by you or by an earlier failure: open it again."""


class TimedOutError(OdqError, TimeoutError):
    """It took longer than ``timeout_ms``: check whether it happened, or just do it again.

    The operation was cancelled, but a write that was under way may still become durable. Publish
    with an idempotency key to do it again safely; claims that no caller got are given back.
    """


class WrongContextError(OdqError, RuntimeError):
    """Called from where it can't work: the message says from where to call it. Nothing was done."""


class QueueNotFoundError(OdqError, LookupError):
    """There is no queue of that name: create it, or fix the name."""


class QueueExistsError(OdqError):
    """There is a queue of that name already: use it, or choose another name."""


class MessageExpiredError(OdqError):
    """A message's retention is over and its payload gone: give up on it. Nothing was changed."""


class CorruptStoreError(OdqError):
    """The store holds bytes that make no sense: give up on this row and keep it for study.

    ``key`` is the row's key, where one is known.
    """

    def __init__(self, message: str, *, key: bytes | None = None) -> None:
        super().__init__(message if key is None else f"{message} (key {key.hex()})")
        self.key = key


class FormatVersionError(OdqError):
    """The root was written by a newer release: upgrade this one."""


class ShardFullError(OdqError):
    """A shard has given out all of its 2³² sequence numbers: give up on it, start another root."""


class OtherRoleError(OdqError):
    """This process has another role in its root: ask the one at ``address``, if it has one.

    Nothing was done.
    """

    def __init__(self, message: str, *, address: str | None = None) -> None:
        super().__init__(message)
        self.address = address
