"""Routing among many queues: as evaluating every filter would, without doing so."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from opendata_queue.filters import (
    And,
    Boolean,
    Comparison,
    Evaluation,
    Filter,
    FilterIndex,
    Header,
    In,
    Number,
    Operator,
    Or,
    Rule,
    SystemFields,
    Text,
)
from tests.filters.strategies import filters, headers_of_messages, system_fields

SYS = SystemFields(0, 0, 0, 0)


def index_of(*texts: str) -> FilterIndex[int]:
    index: FilterIndex[int] = FilterIndex()
    for number, text in enumerate(texts):
        index.add(number, Filter.parse(text))
    return index


def test_a_message_is_routed_to_every_queue_that_it_matches_in_the_order_added() -> None:
    index = index_of("a = 'x' PRIORITY 1", "", "a = 'y'", "a IN ('x', 'y') AND b > 5", "b = 6")

    assert index.route({"a": "x", "b": "6.0"}, SYS) == [(0, 1), (1, 128), (3, 128), (4, 128)]
    assert index.route({}, SYS) == [(1, 128)]


def test_only_filters_that_can_match_are_looked_at() -> None:
    index = index_of(
        *(f"tenant = 't{number}'" for number in range(1_000)),
        *(f"tenant_id = {number}" for number in range(1_000)),
    )

    assert index.candidates({"tenant": "t7", "tenant_id": "7.0"}) == [7, 1_007]
    assert index.candidates({"tenant": "other"}) == []


def test_a_term_that_all_filters_share_does_not_gather_them_in_one_bucket() -> None:
    index = index_of(*(f"env = 'prod' AND tenant = 't{number}'" for number in range(1_000)))

    assert len(index.candidates({"env": "prod", "tenant": "t7"})) <= 2


def test_alternatives_are_found_by_each_of_their_terms_and_once() -> None:
    index = index_of("a = 'x' OR b = 'y'; c = TRUE PRIORITY 3")

    assert index.route({"a": "x"}, SYS) == [(0, 128)]
    assert index.route({"b": "y"}, SYS) == [(0, 128)]
    assert index.route({"c": "true"}, SYS) == [(0, 3)]
    assert index.route({"a": "x", "b": "y", "c": "true"}, SYS) == [(0, 128)]
    assert index.candidates({"a": "y"}) == []


def test_a_filter_that_nothing_can_match_is_never_looked_at() -> None:
    assert index_of("FALSE AND a > 1", "FALSE").candidates({"a": "2"}) == []


def test_many_filters_on_as_many_headers_are_no_more_work() -> None:
    index = index_of(*(f"h{number} = 'x'" for number in range(1_000)))

    assert index.candidates({"h7": "x", "h8": "y"}) == [7]


def test_it_knows_whether_headers_alone_decide() -> None:
    index = index_of("a = 'x'", "b > 5 OR NOT (c = 'y' AND sys.id IN (1, 2))", "sys.id > 5")
    index.remove(1)
    assert index.asks_for_system_fields

    index.add(2, Filter.parse("a LIKE 'x%'"))
    assert not index.asks_for_system_fields

    index.add(1, Filter.parse("a = 'x' AND sys.visible_at BETWEEN 1 AND 2"))
    assert index.asks_for_system_fields


def test_a_new_filter_takes_the_place_of_the_old_one() -> None:
    index = index_of("a = 'x'", "a = 'x'")
    index.add(0, Filter.parse("a = 'y'"))

    assert index.route({"a": "x"}, SYS) == [(1, 128)]
    assert index.route({"a": "y"}, SYS) == [(0, 128)]
    assert len(index) == 2


def test_what_was_removed_leaves_nothing_behind() -> None:
    index = index_of("a = 'x' OR b = 5", "a IN ('x', 'x')", "a > 5", "")
    for number in range(4):
        index.remove(number)
    index.remove(99)

    assert len(index) == 0
    assert 0 not in index
    assert vars(index) | {"_next_order": 0, "version": 0} == vars(FilterIndex())


# Small worlds, so that filters share terms with each other and with messages.
NAMES = st.sampled_from("ab").map(Header)
TEXTS = st.sampled_from(["x", "5", "5.0", "true", "false"]).map(Text)
NUMBERS = st.sampled_from(["5", "5.00", "6"]).map(lambda text: Number(Decimal(text)))
EQUALITIES = st.sampled_from([Operator.EQUAL, Operator.NOT_EQUAL])
TERMS = st.one_of(
    st.booleans().map(Boolean),
    st.builds(Comparison, NAMES, EQUALITIES, TEXTS | NUMBERS | st.booleans().map(Boolean)),
    st.builds(In, NAMES, st.lists(TEXTS, min_size=1, max_size=3).map(tuple)),
    st.builds(In, NAMES, st.lists(NUMBERS, min_size=1, max_size=3).map(tuple)),
)
ALTERNATIVES = st.lists(TERMS, min_size=2, max_size=3).map(lambda terms: Or(tuple(terms)))
BOTH = st.lists(TERMS | ALTERNATIVES, min_size=2, max_size=3).map(lambda terms: And(tuple(terms)))
EITHER = st.lists(TERMS | BOTH, min_size=2, max_size=3).map(lambda terms: Or(tuple(terms)))
RULES = st.builds(Rule, TERMS | BOTH | EITHER, st.none() | st.integers(0, 3))
INDEXABLE = st.lists(RULES, min_size=1, max_size=2).map(lambda rules: Filter(tuple(rules)))
SMALL_HEADERS = st.dictionaries(
    st.sampled_from("abc"), st.sampled_from(["x", "5", "05", "5.0", "6", "true", "false"])
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            INDEXABLE | filters() | st.none(),
            SMALL_HEADERS | headers_of_messages,
            system_fields,
        ),
        max_size=12,
    )
)
@settings(max_examples=150)
def test_routing_with_the_index_is_routing_without(
    steps: list[tuple[int, Filter | None, dict[str, str], SystemFields]],
) -> None:
    index: FilterIndex[int] = FilterIndex()
    model: dict[int, Filter] = {}
    for queue, parsed, headers, sys in steps:
        model.pop(queue, None)
        if parsed is None:
            index.remove(queue)
        else:
            index.add(queue, parsed)
            model[queue] = parsed

        expected = [
            (number, priority)
            for number, each in model.items()
            if (priority := each.priority_if_match(headers, sys)) is not None
        ]
        assert index.route(headers, sys) == expected
        assert set(index.candidates(headers)) >= {number for number, _ in expected}
        assert len(index) == len(model)


@given(
    st.lists(INDEXABLE | filters(), max_size=8),
    st.lists(st.tuples(st.integers(0, 9), INDEXABLE | st.none()), max_size=4),
    SMALL_HEADERS | headers_of_messages,
    system_fields,
)
@settings(max_examples=100)
def test_an_evaluation_in_pieces_answers_for_the_filters_that_are_there_at_its_end(
    given: list[Filter],
    changes: list[tuple[int, Filter | None]],
    headers: dict[str, str],
    sys: SystemFields,
) -> None:
    index: FilterIndex[int] = FilterIndex()
    for number, one in enumerate(given):
        index.add(number, one)
    evaluation = Evaluation(index, headers, sys)
    left = list(changes)
    while (found := evaluation.go_on(lambda _: True)) is None:
        if left:
            queue, changed = left.pop()
            index.remove(queue) if changed is None else index.add(queue, changed)

    assert found == index.route(headers, sys)


def test_an_evaluation_in_pieces_evaluates_no_filter_twice_though_others_change() -> None:
    index = index_of(*(f"a LIKE '{number}%'" for number in range(5)))
    evaluation = Evaluation(index, {"a": "3"}, SYS)
    pieces = 0
    while evaluation.go_on(lambda _: True) is None:
        pieces += 1
        index.remove(4)
        index.add(4, Filter.parse("a LIKE '3%'"))
        if pieces == 7:
            break

    # Those that stay once each; the one that is another one each time is evaluated each time.
    assert pieces == 7
    assert set(evaluation._answers) >= {0, 1, 2, 3}
    assert len(evaluation._answers) == 7


def test_the_worst_cost_of_an_index_is_that_of_the_filters_in_it() -> None:
    index = index_of("a = 'x'", "a LIKE '%x%y_z%'")
    assert index.worst_us == sum(
        Filter.parse(one).worst_us for one in ("a = 'x'", "a LIKE '%x%y_z%'")
    )
    index.add(0, Filter.parse("a LIKE '%x%'"))
    index.remove(1)
    assert index.worst_us == Filter.parse("a LIKE '%x%'").worst_us
    index.remove(0)
    assert index.worst_us == 0


@settings(max_examples=50)
@given(filters(), headers_of_messages, system_fields)
def test_only_the_headers_that_a_filter_names_make_a_difference(
    filter: Filter, headers: dict[str, str], sys: SystemFields
) -> None:
    wanted = {name: value for name, value in headers.items() if name in filter.headers}

    assert filter.priority_if_match(wanted, sys) == filter.priority_if_match(headers, sys)


def test_an_index_names_the_headers_that_its_filters_look_at() -> None:
    index = index_of("a = 'x' PRIORITY 1", "b LIKE 'y%' OR c IS NULL", "a IN (1) PRIORITY d")
    version = index.version

    assert index.headers == {"a", "b", "c", "d", "priority"}

    index.remove(1)
    assert index.headers == {"a", "d"}
    index.add(0, Filter.parse("TRUE PRIORITY 2"))
    assert index.headers == {"a", "d"}
    index.remove(2)
    assert index.headers == set()
    assert index.version > version
