"""What ``odq serve`` and ``odq tailer`` do with their options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, NoReturn

import typer
from pydantic import ValidationError

from opendata_queue.cli.common import duration_ms
from opendata_queue.cli.serve import options
from opendata_queue.model.errors import OdqError
from opendata_queue.model.safe_text import harmless

_FAILED: Final = 1
_WRONG: Final = 2


def run_server(
    store: str,
    *,
    log_json: bool,
    jwt_secret: str | None,
    jwt_key_file: Path | None,
    retention_every: str,
    only_routes: bool = False,
    **settings: Any,
) -> None:
    """Serve a root until a signal; errors end the command. ``settings`` are ``ServerSettings``."""
    try:
        from opendata_queue.http.requests.logs import log_to_stderr
        from opendata_queue.http.server import serving
        from opendata_queue.http.settings import ServerSettings
    except ImportError as error:
        _fail(f"{error}: install opendata-queue[server]")
    log_to_stderr(as_json=log_json)
    try:
        checked = ServerSettings(
            jwt_key=_read_key(jwt_secret, jwt_key_file),
            retention_interval_ms=duration_ms(retention_every),
            **settings,
        )
        run = serving.run_tailer if only_routes else serving.run
        run(store, checked, announce=_announce)
    except ValidationError as error:
        _fail(_wrong_settings(error), _WRONG)
    except OdqError as error:
        _fail(str(error))


def _announce(what: str) -> None:
    print(harmless(what), flush=True)


def _read_key(secret: str | None, file: Path | None) -> str | None:
    if secret is not None and file is not None:
        raise typer.BadParameter("give --jwt-secret or --jwt-key-file, not both")
    if secret is None and file is None:
        _check_not_empty(options.JWT_SECRET_VARIABLE)
        _check_not_empty(options.JWT_KEY_FILE_VARIABLE)
    if file is None:
        return secret
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint="--jwt-key-file") from None


def _check_not_empty(variable: str) -> None:
    """Refuse a variable that is set to nothing: it was meant to ask for tokens."""
    if os.environ.get(variable) == "":
        raise typer.BadParameter(
            f"{variable} is set, and empty: give it a value, or unset it to ask for no tokens"
        )


def _wrong_settings(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def _fail(message: str, code: int = _FAILED) -> NoReturn:
    typer.echo(harmless(f"Error: {message}", keep="\n"), err=True)
    raise typer.Exit(code)
