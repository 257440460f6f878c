"""``--hosts``: every command that takes a token takes it, too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any, Final

import typer

Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="HOSTS",
        envvar="ODQ_HOSTS",
        help=(
            "Hosts that may get the token in addition to the server's own, if a root or a server "
            "says that it is served elsewhere: names, *.domain, addresses, networks, with commas "
            "between."
        ),
    ),
]
_given: Final[ContextVar[list[str] | None]] = ContextVar("hosts", default=None)


def given_hosts() -> list[str] | None:
    """The hosts that were given to the running command; none without the option."""
    return _given.get()


def take_hosts(app: typer.Typer) -> None:
    """Add the option to all commands of ``app`` that have a token."""
    for command in app.registered_commands:
        callback = command.callback
        if callback is not None and "token" in inspect.signature(callback).parameters:
            command.callback = _with_hosts(callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            take_hosts(group.typer_instance)


def _with_hosts(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def command(*arguments: Any, hosts: str | None = None, **options: Any) -> Any:
        listed = None if hosts is None else [one.strip() for one in hosts.split(",")]
        before = _given.set(listed)
        try:
            return callback(*arguments, **options)
        finally:
            _given.reset(before)

    signature = inspect.signature(callback, eval_str=True)
    parameters = list(signature.parameters.values())
    place = [one.name for one in parameters].index("token") + 1
    hosts = inspect.Parameter(
        "hosts", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Hosts
    )
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    parameters.insert(place, hosts)
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command
