"""What is no secret to sign tokens with, though it is long enough: what others know."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    load_der_private_key,
    load_der_public_key,
    load_ssh_public_key,
)
from cryptography.x509 import load_der_x509_certificate

from opendata_queue.errors import InvalidInputError

# As examples say it, ours and others'.
_PLACEHOLDERS: Final = re.compile(r"change[ _-]?(me|this|it)\b|trying it out|placeholder", re.I)
_PEM_OR_JWK: Final = re.compile(r"-----BEGIN |\"kty\"")


def refuse_what_is_no_secret(key: str) -> None:
    """Refuse what others know: with a public key as the secret, anybody could sign."""
    if _PLACEHOLDERS.search(key):
        raise InvalidInputError(
            "the secret for tokens is the placeholder of an example, which everybody knows: "
            "make one with `openssl rand -base64 48`"
        )
    if _PEM_OR_JWK.search(key) or any(map(_is_key, _decoded(key))) or _is_ssh(key):
        raise InvalidInputError(
            "the key for tokens is no secret, but a key or a certificate of another form: give a "
            "public key in PEM, from -----BEGIN PUBLIC KEY----- on"
        )


def _decoded(key: str) -> Iterator[bytes]:
    """The bytes that a text may stand for, in base64 of either alphabet and in hexadecimal."""
    packed = "".join(key.split())
    padded = packed.rstrip("=") + "=" * (-len(packed.rstrip("=")) % 4)
    for alphabet in (None, b"-_"):
        try:
            yield base64.b64decode(padded, altchars=alphabet, validate=True)
        except (binascii.Error, ValueError):
            continue
    try:
        yield bytes.fromhex(packed)
    except ValueError:
        return


def _is_key(data: bytes) -> bool:
    for load in (
        load_der_public_key,
        lambda found: load_der_private_key(found, None),
        load_der_x509_certificate,
    ):
        try:
            load(data)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            if isinstance(error, TypeError):  # a private key with a password
                return True
            continue
        return True
    return False


def _is_ssh(key: str) -> bool:
    try:
        load_ssh_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm):
        return False
    return True
