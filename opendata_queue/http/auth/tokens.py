"""Bearer tokens (JWT): who calls, and what they may do."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from opendata_queue.http.auth.browsers import is_loopback
from opendata_queue.http.auth.key_checks import refuse_what_is_no_secret
from opendata_queue.http.auth.namespaces import Caller, allowed_by, unrestricted_caller
from opendata_queue.http.refusals import Refusal, unauthorized
from opendata_queue.http.settings import ServerSettings
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError

MIN_SECRET_BYTES: Final = 32

_ALL: Final = "*"
_TOKENS_KEPT: Final = 1_024
_MAX_TOKEN_CHARACTERS: Final = 8_192
_PEM: Final = "-----BEGIN "
_LAST_SECOND: Final = 253_402_300_799
"""Of the year 9999."""


class Gate:
    """Lets callers in: all of them, or those with a valid token."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._clock = clock
        self._tokens = None if settings.jwt_key is None else _Tokens(settings)
        self._unrestricted = unrestricted_caller()

    def caller(self, authorization: str | None) -> Caller:
        """Who sent a request with this ``Authorization``; a ``Refusal`` without a valid token."""
        if self._tokens is None:
            return self._unrestricted
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise unauthorized("a token is needed: send Authorization: Bearer …")
        return self._tokens.caller(token.strip(), self._clock.now_ms())


class _Tokens:
    """Checks tokens. The signature of one is checked once, its times at every request."""

    def __init__(self, settings: ServerSettings) -> None:
        assert settings.jwt_key is not None
        self._key = settings.jwt_key.strip()
        self._audience = settings.jwt_audience
        self._issuer = settings.jwt_issuer
        # What a token says of its own algorithm is not believed: if a public key were taken for
        # a shared secret, all who know it could sign.
        self._algorithms = [_algorithm(self._key)]
        self._known: OrderedDict[str, tuple[Caller, dict[str, Any]]] = OrderedDict()

    def caller(self, token: str, now_ms: int) -> Caller:
        known = self._known.get(token)
        if known is None:
            claims = self._verified(token)
            known = self._known[token] = _caller(claims), claims
            if len(self._known) > _TOKENS_KEPT:
                self._known.popitem(last=False)
        caller, claims = known
        _check_times(claims, now_ms)
        return caller

    def _verified(self, token: str) -> dict[str, Any]:
        if len(token) > _MAX_TOKEN_CHARACTERS:
            raise unauthorized(f"the token has over {_MAX_TOKEN_CHARACTERS} characters")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key,
                algorithms=self._algorithms,
                audience=self._audience,
                issuer=self._issuer,
                options={
                    "require": ["exp"],
                    # Times are judged by the broker's own clock.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                    "verify_aud": self._audience is not None,
                },
            )
        except RecursionError as error:
            raise unauthorized("the token is not valid: it is nested too deep") from error
        except (
            *(jwt.PyJWTError, ValueError, TypeError, KeyError),
            *(AttributeError, OverflowError),
        ) as error:
            raise unauthorized(f"the token is not valid: {error}") from error
        if self._audience is None and "aud" in claims:
            # It was made for another service that trusts the same key.
            raise unauthorized("the token is for an audience, and this broker was not given one")
        return claims


def _algorithm(key: str) -> str:
    """What tokens must be signed with; an error if nothing can be checked with the key."""
    if not key.startswith(_PEM):
        if len(key.encode()) < MIN_SECRET_BYTES:
            raise InvalidInputError(f"the secret for tokens has less than {MIN_SECRET_BYTES} bytes")
        refuse_what_is_no_secret(key)
        return "HS256"
    if "PRIVATE KEY" in key:
        raise InvalidInputError("the key for tokens is a private one: give its public key")
    try:
        loaded = load_pem_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInputError(f"the key for tokens is no public key in PEM: {error}") from error
    if isinstance(loaded, RSAPublicKey):
        return "RS256"
    if isinstance(loaded, EllipticCurvePublicKey) and isinstance(loaded.curve, SECP256R1):
        return "ES256"
    raise InvalidInputError("the key for tokens is neither for RS256 (RSA) nor for ES256 (P-256)")


def _check_times(claims: dict[str, Any], now_ms: int) -> None:
    if claims["exp"] * 1000 <= now_ms:
        raise unauthorized("the token has expired")
    if claims.get("nbf", 0) * 1000 > now_ms:
        raise unauthorized("the token is not valid yet")


def _check_is_time(claims: dict[str, Any], name: str) -> None:
    """Refuse what would never come or never end: NaN, which is less than nothing, and infinity."""
    found = claims.get(name, 0)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not is_number or not 0 <= found <= _LAST_SECOND:
        raise unauthorized(f"the token's {name} is no time: seconds since 1970, up to year 9999")


def _caller(claims: dict[str, Any]) -> Caller:
    for name in ("exp", "nbf", "iat"):
        _check_is_time(claims, name)
    subject = claims.get("sub", "")
    if not isinstance(subject, str):
        raise unauthorized("the token's sub is no text")
    namespaces = _texts(claims, "namespaces")
    actions = _texts(claims, "actions")
    return Caller(
        namespaces=None if _ALL in namespaces else frozenset(namespaces),
        actions=allowed_by(actions),
        subject=subject,
    )


def _texts(claims: dict[str, Any], name: str) -> list[str]:
    found = claims.get(name, [])
    if isinstance(found, str):
        found = [found]
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise _bad_claim(name)
    return found


def _bad_claim(name: str) -> Refusal:
    return unauthorized(f"the token's {name} are no list of texts")


def check_address(settings: ServerSettings) -> None:
    """Refuse to be open to the world by accident."""
    if settings.uses_tokens or settings.insecure or is_loopback(settings.host):
        return
    raise InvalidInputError(
        f"without tokens only this machine may connect, and {settings.host} is for others too: "
        "give a key for tokens (ODQ_JWT_SECRET, --jwt-key-file), listen on 127.0.0.1, or say "
        "--insecure"
    )
