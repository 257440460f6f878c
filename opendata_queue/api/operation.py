"""The declaration of an operation: a method of ``AsyncSystem`` with what others must know of it.

All else comes from it: the route and the OpenAPI document of a broker, who may call it, the call of
a client, the refusals of systems that do not have it, and the method without ``await``.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar, cast

Action = Literal["publish", "consume", "view", "admin"]
"""What the caller of an operation must be allowed to do. ``view`` is for what only shows."""

ACTIONS: Final[tuple[Action, ...]] = typing.get_args(Action)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of a system."""

    name: str
    """Under which brokers offer it; mostly that of the method."""
    method: Callable[..., Any]
    """As it is declared, without a body."""
    signature: inspect.Signature
    action: Action
    summary: str
    """One line, for lists of operations."""
    doing: str
    """Completes "can't …" in the refusals of systems that do not have it."""
    answer: str | None
    """The field of an answer that holds the result; none if the result is the answer."""
    repeatable: bool
    """Whether doing it twice does no harm, so that a client without an answer may try again."""
    gives_much: bool
    """Whether an answer may hold many messages, and is made in pieces."""

    @property
    def is_of_a_queue(self) -> bool:
        """Whether it is about one queue, its first argument; others are about the whole root."""
        return "name" in self.signature.parameters

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """All but ``self``."""
        return list(self.signature.parameters.values())[1:]

    def types(self) -> dict[str, Any]:
        """The types of the parameters, and of the result as ``return``."""
        return typing.get_type_hints(self.method)

    def bound(self, *given: Any, **named: Any) -> dict[str, Any]:
        """The arguments of a call by the names of their parameters, defaults included."""
        bound = self.signature.bind(*given, **named)
        bound.apply_defaults()
        del bound.arguments["self"]
        return bound.arguments

    async def call(self, system: object, arguments: Mapping[str, Any]) -> Any:
        """Have a system do it, with arguments by the names of their parameters."""
        given: list[Any] = []
        named: dict[str, Any] = {}
        for one in self.parameters:
            if one.kind is one.VAR_POSITIONAL:
                given += arguments[one.name]
            elif one.kind is one.POSITIONAL_OR_KEYWORD:
                given.append(arguments[one.name])
            elif one.kind is one.VAR_KEYWORD:
                named |= arguments[one.name]
            else:
                named[one.name] = arguments[one.name]
        return await getattr(system, self.method.__name__)(*given, **named)


class Performing(Protocol):
    """A system that does operations for which it has no method of its own, or refuses them."""

    async def _perform(self, operation: Operation, arguments: dict[str, Any]) -> Any: ...


def operation(
    *,
    action: Action,
    name: str | None = None,
    summary: str | None = None,
    doing: str | None = None,
    answer: str | None = None,
    repeatable: bool = True,
    gives_much: bool = False,
) -> Callable[[F], F]:
    """Declare a method as an operation; see ``Operation``. Its body is ``_perform`` of the system.

    Without ``summary`` it is the first line of the docstring.
    """

    def declare(method: F) -> F:
        called = name or method.__name__
        first_line = (inspect.getdoc(method) or "").partition("\n")[0]
        declared = Operation(
            name=called,
            method=method,
            signature=inspect.signature(method),
            action=action,
            summary=summary or first_line.removesuffix("."),
            doing=doing or called.replace("_", " "),
            answer=answer,
            repeatable=repeatable,
            gives_much=gives_much,
        )

        @functools.wraps(method)
        async def perform(self: Performing, *given: Any, **named: Any) -> Any:
            return await self._perform(declared, declared.bound(self, *given, **named))

        perform.operation = declared  # type: ignore[attr-defined]
        return cast(F, perform)

    return declare


def operations_of(interface: type) -> dict[str, Operation]:
    """Those that a class declares, in their order."""
    declared = (getattr(member, "operation", None) for member in vars(interface).values())
    return {one.name: one for one in declared if isinstance(one, Operation)}
