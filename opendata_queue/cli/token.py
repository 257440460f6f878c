"""``odq token``: make a token for a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from opendata_queue.api.operation import ACTIONS
from opendata_queue.cli.common import AsJson, duration_seconds, print_json, time_text
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import InvalidInputError, StoreAccessError

_ALL: Final = "*"
_MIN_SECRET_BYTES: Final = 32


def token(
    namespaces: Annotated[
        list[str] | None,
        typer.Option("--namespace", "-n", metavar="NAME", help="For which; * is for all of them."),
    ] = None,
    actions: Annotated[
        list[str] | None,
        typer.Option("--action", "-a", metavar="ACTION", help="publish, consume, view or admin."),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option(help="Whom it is for. Ids of /dequeue can be acked by the same subject."),
    ] = None,
    expires: Annotated[
        int,
        typer.Option(
            metavar="DURATION", parser=duration_seconds, help="For how long it is good, like 30d."
        ),
    ] = 86_400,
    audience: Annotated[
        str | None, typer.Option(envvar="ODQ_JWT_AUDIENCE", help="Whom it is meant for.")
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(envvar="ODQ_JWT_ISSUER", help="Who has made it.")
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            envvar="ODQ_JWT_SECRET",
            help="The server's secret. Better set as ODQ_JWT_SECRET: arguments can be seen by "
            "others.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with that secret, or with the private key in PEM whose public key the "
            "server has (RS256, ES256)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token for a server, and print it.

    It says which namespaces its bearer may use and what they may do there. Without --action it may
    publish and consume. With view alone it sees queues and messages, and can't claim any. Metrics,
    and queues of all namespaces, take --namespace '*' --action admin.

    Examples:
      odq token --namespace shop --expires 30d
      odq token --namespace shop --action view
      odq token --namespace '*' --action admin --key-file private.pem
    """
    wanted = _names(namespaces)
    allowed = _checked_actions(actions)
    if expires < 1:
        raise InvalidInputError("--expires is no time at all: write a duration like 30d")
    key, algorithm = _key(secret, key_file)
    now_seconds = SystemClock().now_ms() // 1000
    claims: dict[str, Any] = {
        "namespaces": wanted,
        "actions": allowed,
        "iat": now_seconds,
        "exp": now_seconds + expires,
    }
    claims |= {"sub": subject} if subject else {}
    claims |= {"aud": audience} if audience else {}
    claims |= {"iss": issuer} if issuer else {}
    made = _signed(claims, key, algorithm)
    if as_json:
        print_json({"token": made, "expires_at": time_text(claims["exp"] * 1000), **claims})
    else:
        typer.echo(made)


def _names(namespaces: list[str] | None) -> list[str]:
    if not namespaces or not all(namespaces):
        raise InvalidInputError("say for which namespaces it is: --namespace NAME, or '*'")
    return namespaces


def _checked_actions(actions: list[str] | None) -> list[str]:
    for one in actions or ():
        if one not in (*ACTIONS, _ALL):
            raise InvalidInputError(f"{one!r} is no action; there are {', '.join(ACTIONS)}")
    return actions or ["publish", "consume"]


def _key(secret: str | None, file: Path | None) -> tuple[str, str]:
    """What to sign with, and how."""
    key = secret
    if file is not None:
        try:
            key = file.read_text().strip()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"{file} is no text") from error
    if not key:
        raise InvalidInputError(
            "say what to sign it with: set ODQ_JWT_SECRET to the server's secret, or give "
            "--key-file"
        )
    if "PUBLIC KEY" in key:
        raise InvalidInputError("that is a public key: tokens are signed with the private one")
    if "PRIVATE KEY" not in key:
        if len(key.encode()) < _MIN_SECRET_BYTES:
            raise InvalidInputError(f"the secret has less than {_MIN_SECRET_BYTES} bytes")
        return key, "HS256"
    return key, "RS256" if _is_rsa(key) else "ES256"


def _is_rsa(key: str) -> bool:
    try:
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise _missing(error) from error
    try:
        return isinstance(load_pem_private_key(key.encode(), None), RSAPrivateKey)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"the private key can't be used: {error}") from error


def _signed(claims: dict[str, Any], key: str, algorithm: str) -> str:
    try:
        import jwt
    except ImportError as error:
        raise _missing(error) from error
    try:
        return jwt.encode(claims, key, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise InvalidInputError(f"the key can't sign with {algorithm}: {error}") from error


def _missing(error: ImportError) -> StoreAccessError:
    return StoreAccessError(f"{error}: install opendata-queue[server]")
