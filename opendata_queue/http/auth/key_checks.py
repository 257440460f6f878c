"""What is no secret to sign tokens with, though it is long enough: what others know."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Iterator
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    SECP521R1,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    load_der_private_key,
    load_der_public_key,
    load_ssh_public_key,
)
from cryptography.x509 import load_der_x509_certificate, load_der_x509_csr

from opendata_queue.model.errors import InvalidInputError

# As examples say it, ours and others'.
_PLACEHOLDERS: Final = re.compile(r"change[ _-]?(me|this|it)\b|trying it out|placeholder", re.I)
_KNOWN_FORMS: Final = re.compile(
    r"----[ +]?BEGIN|[\"'](kty|x5c)\\?[\"']|^\s*(Modulus|Public-Key)\s*[=:(]", re.I | re.M
)
"""PEM, SSH2 and PGP; a JWK or a set of them; what openssl prints of a key."""

_SSH_BLOB: Final = re.compile(rb"\0\0\0[\x07-\x40](ssh|ecdsa|sk|rsa|x509v3)-")
_BETWEEN_DIGITS: Final = re.compile(r"(\\[nrt]|[\s:,\"'-])+")
_NESTED: Final = 3
"""How often a key may be wrapped: the base64 of a PEM, for example, as Kubernetes shows secrets."""

_POINT_BYTES: Final = {65: SECP256R1(), 97: SECP384R1(), 133: SECP521R1()}


def refuse_what_is_no_secret(key: str) -> None:
    """Refuse what others know: with a public key as the secret, all who know it could sign."""
    if _PLACEHOLDERS.search(key):
        raise InvalidInputError(
            "the secret for tokens is the placeholder of an example, which is public: "
            "make one with `openssl rand -base64 48`"
        )
    if _is_known(key, _NESTED):
        raise InvalidInputError(
            "the key for tokens is no secret, but a key or a certificate of another form: give a "
            "public key in PEM, from -----BEGIN PUBLIC KEY----- on"
        )


def _is_known(key: str, nested: int) -> bool:
    """Whether a text is a key or a certificate, in any of the forms in which they are passed on."""
    if _KNOWN_FORMS.search(key) or _is_ssh(key):
        return True
    for data in _decoded(key):
        if _is_key(data) or _is_point(data) or _SSH_BLOB.match(data):
            return True
        if nested and _is_known(data.decode(errors="replace"), nested - 1):
            return True
    return False


def _decoded(key: str) -> Iterator[bytes]:
    """The bytes that a text may stand for, in base64 of either alphabet and in hexadecimal."""
    text = key.rpartition("base64,")[2]  # of a data URL
    digits = re.sub(r"^(0x|\\x)", "", _BETWEEN_DIGITS.sub("", text), flags=re.I)
    with contextlib.suppress(ValueError):
        yield bytes.fromhex(digits)
    without_breaks = re.sub(r"(\\[nrt]|[\s\"',])+", "", text)
    for packed in dict.fromkeys([without_breaks, *text.split()]):
        bare = packed.rstrip("=")
        padded = bare + "=" * (-len(bare) % 4)
        for alphabet in (None, b"-_"):
            with contextlib.suppress(binascii.Error, ValueError):
                yield base64.b64decode(padded, altchars=alphabet, validate=True)


def _is_key(data: bytes) -> bool:
    for load in (
        load_der_public_key,
        lambda found: load_der_private_key(found, None),
        load_der_x509_certificate,
        load_der_x509_csr,
    ):
        try:
            load(data)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            if not isinstance(error, ValueError):  # it has a password, or is of an unusual kind
                return True
            continue
        return True
    return False


def _is_point(data: bytes) -> bool:
    """Whether that is a public key of a curve, without a word about which one."""
    curve = _POINT_BYTES.get(len(data))
    if curve is None or data[0] != 4:
        return False
    try:
        EllipticCurvePublicKey.from_encoded_point(curve, data)
    except ValueError:
        return False
    return True


def _is_ssh(key: str) -> bool:
    try:
        load_ssh_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm):
        return False
    return True
