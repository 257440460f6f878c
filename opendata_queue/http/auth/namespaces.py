"""Namespaces: what a caller may see and touch.

The namespace of a message is its header ``namespace``; that of a queue is the part of its name
before the first ``/``. Where tokens are used, a queue of a namespace has its filter confined to
that namespace, rule by rule, so that it only ever receives that namespace's messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from opendata_queue.api.operation import ACTIONS, Action
from opendata_queue.filters import (
    And,
    Boolean,
    Comparison,
    Condition,
    Filter,
    Header,
    Operator,
    Rule,
    Text,
)
from opendata_queue.http.refusals import forbidden, invalid
from opendata_queue.log.checks import NAMESPACE_HEADER
from opendata_queue.model.messages import NewMessage

IMPLIED: Final[Mapping[Action, Action]] = {"consume": "view"}
"""What a token may do in addition to what it says: tokens of release 0.1 know no ``view``."""
_FILTERS_KEPT: Final = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who makes a request. Without ``namespaces`` it is all of them."""

    namespaces: frozenset[str] | None
    actions: frozenset[Action]
    confines: bool = True
    """Whether namespaces mean anything: they don't on a broker that asks for no tokens."""
    subject: str = ""
    """Whom the token was made out to (``sub``), if that is said."""

    @property
    def everywhere(self) -> bool:
        return self.namespaces is None

    def check_action(self, action: Action) -> None:
        if action not in self.actions:
            # Clients of release 0.1 go by these words; later ones by the code of the answer.
            raise forbidden(f"the token does not allow the action {action!r}")

    def may_use(self, queue: str) -> bool:
        return self.namespaces is None or namespace_of(queue) in self.namespaces

    def check_queue(self, queue: str) -> None:
        if not self.may_use(queue):
            raise forbidden(f"the token is for no namespace that queue {queue!r} is in")

    def may_see(self, headers: Iterable[tuple[str, str]]) -> bool:
        """Whether a message is of the caller's; of a header given twice the last one counts."""
        return self.namespaces is None or dict(headers).get(NAMESPACE_HEADER) in self.namespaces

    def stamp(self, message: NewMessage) -> None:
        """Set the namespace of a message that does not say it, and check that of one that does."""
        if self.namespaces is None:
            return
        given = message.headers.get(NAMESPACE_HEADER)
        if given is None:
            message.headers = {**message.headers, NAMESPACE_HEADER: self._only_namespace()}
        elif given not in self.namespaces:
            raise forbidden(f"the token does not allow messages of namespace {given!r}")

    def _only_namespace(self) -> str:
        assert self.namespaces is not None
        if len(self.namespaces) != 1:
            raise invalid(
                f"the token is for {len(self.namespaces)} namespaces: say which one in the header "
                f"{NAMESPACE_HEADER!r} of each message"
            )
        return next(iter(self.namespaces))

    # --- filters ---

    def confined(self, queue: str, filter: str) -> str:
        """The filter to store for a queue."""
        namespace = namespace_of(queue)
        return confine(filter, namespace) if self.confines and namespace is not None else filter

    def shown(self, queue: str, filter: str) -> str:
        """The filter as its user gave it."""
        namespace = namespace_of(queue)
        if not self.confines or namespace is None:
            return filter
        given = given_filter(filter, namespace)
        return filter if given is None else given

    def check_confined(self, queue: str, filter: str) -> None:
        """Refuse a queue that was made without tokens, and may hold messages of any namespace."""
        namespace = namespace_of(queue)
        if self.namespaces is None or namespace is None:
            return
        if given_filter(filter, namespace) is None:
            raise forbidden(
                f"queue {queue!r} is not confined to its namespace: an administrator of all "
                "namespaces must purge it and set its filter anew"
            )


def unrestricted_caller(actions: Collection[Action] = ACTIONS) -> Caller:
    """The caller of a broker that asks for no tokens."""
    return Caller(namespaces=None, actions=frozenset(actions), confines=False)


def allowed_by(said: Collection[str]) -> frozenset[Action]:
    """The actions that a token allows which says these; ``*`` is all of them."""
    named = {one for one in ACTIONS if one in said or "*" in said}
    return frozenset(named | {IMPLIED[one] for one in named if one in IMPLIED})


def namespace_of(queue: str) -> str | None:
    namespace, slash, _ = queue.partition("/")
    return namespace if slash else None


def confine(text: str, namespace: str) -> str:
    """A filter that lets through what ``text`` does, if it is of the namespace."""
    term = _term(namespace)
    rules = tuple(
        Rule(_both(term, rule.condition), rule.priority) for rule in Filter.parse(text).rules
    )
    return Filter(rules).text


@lru_cache(maxsize=_FILTERS_KEPT)
def given_filter(text: str, namespace: str) -> str | None:
    """What ``confine`` was given; none if ``text`` does not come from it."""
    rules = []
    for rule in Filter.parse(text).rules:
        rest = _without(_term(namespace), rule.condition)
        if rest is None:
            return None
        rules.append(Rule(rest, rule.priority))
    return Filter(tuple(rules)).text


def _term(namespace: str) -> Comparison:
    return Comparison(Header(NAMESPACE_HEADER), Operator.EQUAL, Text(namespace))


def _both(term: Comparison, condition: Condition) -> Condition:
    if condition == Boolean(True):
        return term
    if isinstance(condition, And):
        return And((term, *condition.operands))
    return And((term, condition))


def _without(term: Comparison, condition: Condition) -> Condition | None:
    if condition == term:
        return Boolean(True)
    if not isinstance(condition, And) or condition.operands[0] != term:
        return None
    rest = condition.operands[1:]
    return rest[0] if len(rest) == 1 else And(rest)
