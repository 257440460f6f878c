"""What can go wrong, one class for each thing that a caller can do about it."""

from __future__ import annotations


class OdqError(Exception):
    """Base of all errors that this package raises on purpose."""


class InvalidInputError(OdqError, ValueError):
    """The call's arguments can't be stored: fix the input. Nothing was written."""


class StoreAccessError(OdqError):
    """The root can't be used as configured: fix the URL, bucket, credentials or permissions."""


class StoreUnavailableError(OdqError):
    """The store did not answer, or not in time: try again later.

    ``in_doubt`` is true when a write was under way and may or may not have become durable. The
    engine never guesses: it stops, and the next open finds out.
    """

    def __init__(self, message: str, *, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


class FencedError(OdqError):
    """Another process has taken this root over: stop using this one, reopen if it should be yours.

    All that was acknowledged before is safe in the store.
    """


class ClosedError(OdqError):
    """It was closed, by you or by an earlier failure: open it again."""


class QueueNotFoundError(OdqError, LookupError):
    """There is no queue of that name: create it, or fix the name."""


class QueueExistsError(OdqError):
    """There is a queue of that name already: use it, or choose another name."""


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
