"""Many filters at once: finding the few that a message can match (RFC 0005, Routing).

``tenant = 'a' AND price > 5`` can only match a message whose header ``tenant`` is ``a``. Such a
filter waits in a bucket under ``('tenant', 'a')`` and is evaluated for the messages that go there
alone, so routing costs what the matching queues cost, not what all of them do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from opendata_queue.filters.compiled import PriorityFunction, compile_priority
from opendata_queue.filters.filter import Filter
from opendata_queue.filters.nodes import (
    And,
    Boolean,
    Comparison,
    Condition,
    Header,
    In,
    Literal,
    Number,
    Operator,
    Or,
    Rule,
    SystemFields,
    Text,
)
from opendata_queue.filters.values import FALSE_TEXT, TRUE_TEXT, exact_number, parse_number

QueueId = TypeVar("QueueId", bound=Hashable)

Value: TypeAlias = str | int | Decimal
Key: TypeAlias = tuple[str, Value]  # a header's name, and its text or the number that it is
Load: TypeAlias = Callable[[Key], int]

_Split: TypeAlias = tuple[tuple[Key, ...] | None, Condition]

_TRUE: Final = Boolean(True)
_SHARED_FUNCTIONS: Final = 1024


# A filter, and how many microseconds it takes for the worst message.
_Entry: TypeAlias = tuple[QueueId, PriorityFunction, int]
# The filters that wait under one key, by the order in which they were added.
_Bucket: TypeAlias = dict[int, _Entry[QueueId]]


class _ByHeader(NamedTuple, Generic[QueueId]):
    """The buckets of one header. Text is looked up as it is, numbers by their value."""

    texts: dict[Value, _Bucket[QueueId]]
    numbers: dict[Value, _Bucket[QueueId]]

    def of(self, value: Value) -> dict[Value, _Bucket[QueueId]]:
        return self.texts if isinstance(value, str) else self.numbers


class FilterIndex(Generic[QueueId]):
    """The filters of all queues. Answers exactly what evaluating each of them would."""

    def __init__(self) -> None:
        self._by_header: dict[str, _ByHeader[QueueId]] = {}
        self._always: _Bucket[QueueId] = {}  # filters that nothing can be said about
        self._placed: dict[QueueId, tuple[int, tuple[Key, ...] | None]] = {}
        self._next_order = 0
        self._asking: set[QueueId] = set()
        self._headers: dict[QueueId, frozenset[str]] = {}
        self._askers: Counter[str] = Counter()
        """How many filters read a header."""
        self._names: frozenset[str] | None = None
        self._worst_us: dict[QueueId, int] = {}
        self.worst_us = 0
        """How many microseconds all filters together take for the worst message, roughly."""
        self.version = 0
        """Another one whenever messages may go elsewhere than before."""

    def __len__(self) -> int:
        return len(self._placed)

    def __contains__(self, queue_id: QueueId) -> bool:
        return queue_id in self._placed

    def add(self, queue_id: QueueId, filter: Filter) -> None:
        """Route to a queue from now on; one that is there gets the new filter."""
        self.remove(queue_id)
        order, self._next_order = self._next_order, self._next_order + 1
        keys, priority_if_match = self._placing(filter)
        worst_us = self._worst_us[queue_id] = filter.worst_us
        self.worst_us += worst_us
        for bucket in self._buckets_to_fill(keys):
            bucket[order] = (queue_id, priority_if_match, worst_us)
        self._placed[queue_id] = (order, keys)
        self._headers[queue_id] = filter.headers
        self._askers.update(filter.headers)
        if filter.asks_for_system_fields:
            self._asking.add(queue_id)

    @property
    def asks_for_system_fields(self) -> bool:
        """Whether one of the filters does; otherwise messages with equal headers go alike."""
        return bool(self._asking)

    @property
    def headers(self) -> frozenset[str]:
        """The names of all headers that filters read; no other makes a difference."""
        if self._names is None:
            self._names = frozenset(self._askers)
        return self._names

    def remove(self, queue_id: QueueId) -> None:
        """Route to a queue no longer; nothing happens if it is not there."""
        self.version += 1
        self._names = None
        self.worst_us -= self._worst_us.pop(queue_id, 0)
        for name in self._headers.pop(queue_id, ()):
            self._askers[name] -= 1
            if not self._askers[name]:
                del self._askers[name]
        order, keys = self._placed.pop(queue_id, (0, ()))
        self._asking.discard(queue_id)
        if keys is None:
            del self._always[order]
            return
        for key in keys:
            self._leave(key, order)

    def route(self, headers: Mapping[str, str], sys: SystemFields) -> list[tuple[QueueId, int]]:
        """The queues that the message matches, each with its priority, in the order added."""
        buckets = self._buckets_of(headers)
        if len(buckets) == 1:  # by far the most common, and in order already
            return [
                (queue_id, priority)
                for queue_id, priority_if_match, _ in buckets[0].values()
                if (priority := priority_if_match(headers, sys)) is not None
            ]
        matched: dict[int, tuple[QueueId, int]] = {}
        for bucket in buckets:
            for order, (queue_id, priority_if_match, _) in bucket.items():
                priority = priority_if_match(headers, sys)
                if priority is not None:
                    matched[order] = (queue_id, priority)
        return [matched[order] for order in sorted(matched)]

    def entries(self, headers: Mapping[str, str]) -> dict[int, _Entry[QueueId]]:
        """The filters that ``route`` evaluates for a message, by the order in which they came."""
        found: dict[int, _Entry[QueueId]] = {}
        for bucket in self._buckets_of(headers):
            found |= bucket
        return {order: found[order] for order in sorted(found)}

    def candidates(self, headers: Mapping[str, str]) -> list[QueueId]:
        """The queues whose filters ``route`` evaluates for a message, in the order added."""
        return [queue_id for queue_id, _, _ in self.entries(headers).values()]

    def _placing(self, filter: Filter) -> tuple[tuple[Key, ...] | None, PriorityFunction]:
        """The keys to put a filter under, and what to ask of a message that has one of them."""
        if len(filter.rules) == 1:
            (rule,) = filter.rules
            keys, remaining = split(rule.condition, self._load)
            if keys is not None:
                return keys, _compiled(Rule(remaining, rule.priority))
        else:
            keys, _ = split(Or(tuple(rule.condition for rule in filter.rules)), self._load)
        return keys, filter.priority_if_match

    def _buckets_of(self, headers: Mapping[str, str]) -> list[_Bucket[QueueId]]:
        found = [self._always] if self._always else []
        by_header = self._by_header
        # Whichever there are fewer of: the message's headers, or those that filters ask for.
        for name in by_header if len(by_header) < len(headers) else headers:
            buckets, text = by_header.get(name), headers.get(name)
            if buckets is None or text is None:
                continue
            texts, numbers = buckets
            bucket = texts.get(text)
            if bucket is not None:
                found.append(bucket)
            if numbers and (number := parse_number(text)) is not None:
                bucket = numbers.get(number)
                if bucket is not None:
                    found.append(bucket)
        return found

    def _buckets_to_fill(self, keys: tuple[Key, ...] | None) -> Iterator[_Bucket[QueueId]]:
        if keys is None:
            yield self._always
            return
        for name, value in keys:
            buckets = self._by_header.setdefault(name, _ByHeader({}, {})).of(value)
            yield buckets.setdefault(value, {})

    def _leave(self, key: Key, order: int) -> None:
        name, value = key
        by_header = self._by_header[name]
        buckets = by_header.of(value)
        del buckets[value][order]
        if not buckets[value]:
            del buckets[value]
        if not by_header.texts and not by_header.numbers:
            del self._by_header[name]

    def _load(self, key: Key) -> int:
        """How many filters wait under a key."""
        name, value = key
        if name not in self._by_header:
            return 0
        bucket = self._by_header[name].of(value).get(value)
        return 0 if bucket is None else len(bucket)


class Evaluation(Generic[QueueId]):
    """``FilterIndex.route`` of one message in pieces: others may run between them.

    They may add and remove filters. The answer is that of the filters which are there when the
    last piece is done, and each of them is evaluated once.
    """

    __slots__ = ("_answers", "_entries", "_headers", "_index", "_left", "_sys", "_version")

    def __init__(
        self, index: FilterIndex[QueueId], headers: Mapping[str, str], sys: SystemFields
    ) -> None:
        self._index = index
        self._headers = headers
        self._sys = sys
        self._version: int | None = None
        self._entries: dict[int, _Entry[QueueId]] = {}
        self._left: Iterator[int] = iter(())
        self._answers: dict[int, int | None] = {}

    def is_of(self, headers: Mapping[str, str], sys: SystemFields) -> bool:
        """Whether this message is evaluated."""
        return self._sys == sys and self._headers == headers

    def go_on(self, is_over: Callable[[int], bool]) -> list[tuple[QueueId, int]] | None:
        """Evaluate at least one more filter; the queues that match once all are, else none.

        ``is_over`` is asked after each filter, with the microseconds that it took at worst.
        """
        if self._version != self._index.version:
            self._version = self._index.version
            self._entries = self._index.entries(self._headers)
            self._left = iter([one for one in self._entries if one not in self._answers])
        for order in self._left:
            _, priority_if_match, worst_us = self._entries[order]
            self._answers[order] = priority_if_match(self._headers, self._sys)
            if is_over(worst_us):
                return None
        return [
            (entry[0], priority)
            for order, entry in self._entries.items()
            if (priority := self._answers[order]) is not None
        ]


@lru_cache(maxsize=_SHARED_FUNCTIONS)
def _compiled(rule: Rule) -> PriorityFunction:
    """One function for all filters of which the same remains.

    Ten thousand functions would do the same, but not fit into the processor's caches.
    """
    return compile_priority((rule,))


def split(condition: Condition, load: Load) -> _Split:
    """Keys of which a message must have at least one, and what else must be TRUE of it.

    The keys are none if nothing can be said. Of the terms of an AND, each of which would do, the
    one is taken whose fullest bucket is the least full: where all filters say ``env = 'prod'``
    and each names another tenant, they spread over the tenants.
    """
    match condition:
        case Boolean(False):
            return (), _TRUE
        case Comparison(Header(name), Operator.EQUAL, literal):
            return ((name, _value(literal)),), _TRUE
        case Comparison(Header(name), Operator.NOT_EQUAL, Boolean(value)):
            return ((name, _value(Boolean(not value))),), _TRUE
        case In(Header(name), literals):
            return tuple(dict.fromkeys((name, _value(literal)) for literal in literals)), _TRUE
        case And(operands):
            return _split_and(condition, [split(below, load) for below in operands], load)
        case Or(operands):
            return _split_or(condition, [split(below, load) for below in operands])
    return None, condition


def _split_and(condition: And, splits: Sequence[_Split], load: Load) -> _Split:
    chosen, lowest = None, None
    for place, (keys, _) in enumerate(splits):
        if keys is not None and (lowest is None or _cost(keys, load) < lowest):
            chosen, lowest = place, _cost(keys, load)
    if chosen is None:
        return None, condition
    keys, besides = splits[chosen]
    left = [below for place, below in enumerate(condition.operands) if place != chosen]
    left += [] if besides == _TRUE else [besides]
    return keys, left[0] if len(left) == 1 else And(tuple(left))


def _split_or(condition: Or, splits: Sequence[_Split]) -> _Split:
    merged: dict[Key, None] = {}
    for keys, _ in splits:
        if keys is None:
            return None, condition
        merged.update(dict.fromkeys(keys))
    # Which of the terms a key stands for is not known; it does not matter if all are just keys.
    only_keys = all(besides == _TRUE for _, besides in splits)
    return tuple(merged), _TRUE if only_keys else condition


def _cost(keys: tuple[Key, ...], load: Load) -> tuple[int, int]:
    return max((load(key) for key in keys), default=0), len(keys)


def _value(literal: Literal) -> Value:
    match literal:
        case Text(value):
            return value
        case Number(value):
            return exact_number(value)
        case Boolean(value):
            return TRUE_TEXT if value else FALSE_TEXT
