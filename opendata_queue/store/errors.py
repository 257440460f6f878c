"""Turns the errors of SlateDB and obstore into ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import obstore.exceptions
import slatedb.uniffi as slatedb
from slatedb.uniffi import InternalError

from opendata_queue.model.errors import (
    AccessProblem,
    ClosedError,
    CorruptStoreError,
    FencedError,
    InvalidInputError,
    OdqError,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.store.problems import with_advice


class LostRaceError(FencedError):
    """Another process made the database at the same moment: it is there now, and can be opened."""


class PanicError(StoreAccessError):
    """SlateDB could not go on: with a setting that it can't take, or with a damaged file."""


# Of several that make a database, or its list of compactions, the others find its first version.
_LOST_RACE = re.compile(r"transactional object .*version already exists")

# What no retry mends. The Rust object_store reports these as text inside generic errors.
_ACCESS_PROBLEMS = {
    r"NoSuchBucket": "the bucket does not exist",
    r"ExpiredToken|TokenRefreshRequired": (
        "the credentials are not accepted: their session has ended, get new ones"
    ),
    r"InvalidAccessKeyId": "the credentials are not accepted: nobody has that access key there",
    r"SignatureDoesNotMatch": "the credentials are not accepted: the secret key is another one",
    r"InvalidToken": "the credentials are not accepted: the session token is not theirs",
    r"RequestTimeTooSkewed": "this machine's clock is wrong by more than the store accepts",
    r"InvalidBucketName": "that is no name for a bucket",
    r"InvalidCertificate|invalid peer certificate": (
        "the endpoint's certificate is not trusted; name the file of its CA in AWS_CA_BUNDLE"
    ),
    # Before what is forbidden: so is asking for a role, on many machines that have none.
    r"missing AWS credentials|CredentialsNotLoaded|169\.254\.169\.254|169\.254\.170\.": (
        "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    ),
    r"AccessDenied|PermissionDenied|Permission denied|Forbidden": "permission denied",
    r"Read-only file system": "the file system is read-only",
    r"Not a directory": "a part of the path is a file, not a folder",
    # As Python says it; what obstore finds to exist is no mistake of the user's.
    r"^\[Errno 17\] File exists": "that is a file, not a folder",
    r"File name too long": "a part of the path is longer than the file system can take",
    r"PermanentRedirect|AuthorizationHeaderMalformed": (
        "the bucket is in another region; set AWS_REGION"
    ),
    r"No space left on device": "no space left on the device",
    r"failed to find latest transactional object": "there is no database",
    r"builder error": "the endpoint can't be used; it must be a URL like http://127.0.0.1:9000",
}
_PROBLEMS = {
    "NoSuchBucket": AccessProblem.NO_BUCKET,
    "failed to find latest transactional object": AccessProblem.NO_DATABASE,
}
# What SlateDB says if the machine's clock is behind the newest row, as when it was just set back.
_CLOCK_IS_BEHIND = "invalid clock tick"
# A manifest that can't be decoded, an empty list, or a WAL file that SlateDB stumbles over.
_DAMAGE = re.compile(
    r"transactional object .*CallbackError\(|invalid compaction|wal_replay task panicked|"
    r"out-of-order seqs",
    re.DOTALL,
)
# What may pass, and is hidden deep inside of what the clients say.
_TROUBLE = {
    r"ConnectionRefused|Connection refused": "nobody listens there",
    r"dns error|failed to lookup address": "there is no host of that name",
    r"received corrupt message|InvalidContentType": "it does not speak TLS; is that http://?",
}


@contextmanager
def translated(doing: str, *, key: bytes | None = None) -> Iterator[None]:
    """Raise our errors for theirs; ``doing`` says what was tried ("open s3://…")."""
    try:
        yield
    except slatedb.Error as error:
        raise _of_slatedb(error, doing, key) from error
    except InternalError as error:  # a panic in Rust
        raise PanicError(f"could not {doing}: {error}") from error
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise _of_object_store(error, doing) from error


def _of_slatedb(error: Exception, doing: str, key: bytes | None) -> OdqError:
    message = f"could not {doing}: {getattr(error, 'message', error)}"
    if isinstance(error, slatedb.Error.Closed):
        if error.reason is slatedb.CloseReason.FENCED:
            return FencedError(f"could not {doing}: another process has taken over")
        if error.reason is slatedb.CloseReason.CLEAN:
            return ClosedError(f"could not {doing}: it is closed")
        return StoreUnavailableError(message)
    if isinstance(error, slatedb.Error.Invalid):
        return InvalidInputError(message)
    if _LOST_RACE.search(message):
        return LostRaceError(f"could not {doing}: another process has opened it at the same moment")
    access = _access_problem(message, doing)
    if access is None and (isinstance(error, slatedb.Error.Data) or _DAMAGE.search(message)):
        return CorruptStoreError(with_advice(message), key=key)
    return access or StoreUnavailableError(message)


def _of_object_store(error: Exception, doing: str) -> OdqError:
    text = str(error)
    found = _access_problem(text, doing)
    if found is not None:
        return found
    denied = (
        obstore.exceptions.PermissionDeniedError,
        obstore.exceptions.UnauthenticatedError,
        PermissionError,
    )
    if isinstance(error, denied):
        return StoreAccessError(f"could not {doing}: permission denied")
    summary = text.split("\n\nDebug source", 1)[0]
    cause = next((f"; {why}" for pattern, why in _TROUBLE.items() if re.search(pattern, text)), "")
    return StoreUnavailableError(f"could not {doing}: {summary.strip()}{cause}")


def _access_problem(text: str, doing: str) -> StoreAccessError | None:
    for pattern, meaning in _ACCESS_PROBLEMS.items():
        if re.search(pattern, text):
            return StoreAccessError(f"could not {doing}: {meaning}", problem=_PROBLEMS.get(pattern))
    return None


def is_missing_bucket(error: FileNotFoundError) -> bool:
    """Whether obstore has found no bucket, which is more than an object that is not there."""
    return "NoSuchBucket" in str(error)


def is_clock_behind(error: slatedb.Error.Invalid) -> bool:
    """Whether SlateDB refuses a compaction because the last one is from a later time."""
    return _CLOCK_IS_BEHIND in error.message


def has_no_database(error: BaseException) -> bool:
    """Whether an error of ours says that there is no database, not yet or not any more."""
    return isinstance(error, StoreAccessError) and error.problem is AccessProblem.NO_DATABASE
