"""Control files: small JSON objects that carry a checksum of themselves (RFC 0002).

All of them are made and read here, so that none is believed that is cut, emptied or has a flipped
bit. Files of release 0.1 have no checksum, and are read as they are.
"""

from __future__ import annotations

import re
import zlib
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from opendata_queue.model.errors import CorruptStoreError

_CHECK: Final = re.compile(rb',"check":"([0-9a-f]{8})"\}')
_CHECK_BYTES: Final = len(b',"check":"00000000"}')
_PROPERTY: Final = b'"check":'
"""No text of a JSON file has it: there a quotation mark is escaped."""

M = TypeVar("M", bound=BaseModel)


def sealed(content: bytes) -> bytes:
    """A JSON object, and its checksum as its last property."""
    body = content[:-1]
    return b'%s,"check":"%08x"}' % (body, zlib.crc32(body))


def sealed_model(model: BaseModel) -> bytes:
    """What a control file holds; a property that is as when nothing is said of it is left out."""
    return sealed(model.model_dump_json(exclude_defaults=True).encode())


def is_sealed(content: bytes) -> bool:
    """Whether a file ends with a checksum, right or wrong."""
    return _CHECK.fullmatch(content[-_CHECK_BYTES:]) is not None


def check_seal(content: bytes, name: str) -> None:
    """Refuse a file that does not have the checksum that it says it has."""
    found = _CHECK.fullmatch(content[-_CHECK_BYTES:])
    if found is not None:
        whole = zlib.crc32(content[:-_CHECK_BYTES]) == int(found[1], 16)
    else:
        whole = _PROPERTY not in content
    if not whole:
        raise CorruptStoreError(f"{name} is damaged: its checksum does not fit")


def parsed(model: type[M], content: bytes, name: str, otherwise: str) -> M:
    """What a file says. ``otherwise`` says what is the matter with one that does not say it."""
    check_seal(content, name)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        problems = "; ".join(_problem(one["loc"], one["msg"]) for one in error.errors())
        raise CorruptStoreError(f"{name} {otherwise}: {problems}") from error


def _problem(place: tuple[int | str, ...], what: str) -> str:
    return f"{'.'.join(map(str, place))}: {what}" if place else what
