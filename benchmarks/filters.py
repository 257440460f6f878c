"""What filters cost: parsing, one evaluation, routing among many queues, and batches in Arrow.

python benchmarks/filters.py
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from opendata_queue.filters import Filter, FilterIndex, SystemFields

ROUNDS = 15
SYS = SystemFields(5, 1_763_000_000_000, 1_763_000_000_000, 1_763_000_000_000)
HEADERS = {
    "type": "order.created",
    "region": "emea",
    "price": "120.50",
    "quantity": "12",
    "topic": "logs.web.3",
}
FILTERS = (
    "",
    "type = 'order.created'",
    "type = 'order.updated'",
    "region IN ('emea', 'apj')",
    "quantity > 5",
    "price >= 99.99",
    "topic LIKE 'logs.%'",
    "topic LIKE 'logs.%.3'",
    "type = 'order.created' AND region IN ('emea', 'apj') AND price >= 99.99"
    " AND topic LIKE 'logs.%'",
)
QUEUES = (10, 1_000, 10_000)
ROUTED = 20_000
BATCH_ROWS = 100_000


def least_seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The least processor time of several rounds: what else runs on the machine adds to it."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def repeated(work: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in itertools.repeat(None, times):
            work()

    return run


def evaluations() -> Table:
    table = Table(title="one filter", title_justify="left")
    for column in ("filter", "parse and compile µs", "evaluate ns"):
        table.add_column(column, justify="left" if column == "filter" else "right")
    for text in FILTERS:
        evaluate = Filter.parse(text).priority_if_match
        parsing = least_seconds(repeated(partial(Filter.parse, text), 200)) / 200

        def many(evaluate: Callable[..., object] = evaluate) -> None:
            for _ in itertools.repeat(None, 20_000):
                evaluate(HEADERS, SYS)

        evaluating = least_seconds(many) / 20_000
        table.add_row(text or "(empty)", f"{parsing * 1e6:,.0f}", f"{evaluating * 1e9:,.0f}")
    return table


def messages(queues: int) -> list[dict[str, str]]:
    """Messages for all tenants in turn, with as many headers as real ones have."""
    return [
        {**HEADERS, "tenant": f"tenant-{number * 7_919 % queues}", "env": "prod"}
        for number in range(ROUTED)
    ]


def routing_rate(filters: Sequence[Filter], batch: Sequence[dict[str, str]], each: int) -> float:
    """Messages per second, each of which must reach ``each`` queues."""
    index: FilterIndex[int] = FilterIndex()
    for number, parsed in enumerate(filters):
        index.add(number, parsed)

    def route_all() -> None:
        for headers in batch:
            assert len(index.route(headers, SYS)) == each

    return len(batch) / least_seconds(route_all)


def routing() -> Table:
    table = Table(title="routing, messages per second", title_justify="left")
    for column in ("filters", *(f"{queues:,} queues" for queues in QUEUES)):
        table.add_column(column, justify="left" if column == "filters" else "right")
    shapes = {
        "tenant = '…'": "tenant = 'tenant-{}'",
        "env = 'prod' AND tenant = '…' AND quantity > 5": (
            "env = 'prod' AND tenant = 'tenant-{}' AND quantity > 5"
        ),
    }
    for shown, template in shapes.items():
        rates = []
        for queues in QUEUES:
            filters = [Filter.parse(template.format(number)) for number in range(queues)]
            rates.append(routing_rate(filters, messages(queues), 1))
        table.add_row(shown, *(f"{rate:,.0f}" for rate in rates))

    rates = []
    for queues in QUEUES:
        filters = [Filter.parse(f"tenant LIKE '%-{number}'") for number in range(queues)]
        rates.append(routing_rate(filters, messages(queues)[: max(20, 100_000 // queues)], 1))
    table.add_row("without the index: tenant LIKE '%-…'", *(f"{rate:,.0f}" for rate in rates))
    return table


def index_upkeep() -> Table:
    table = Table(title="10,000 queues with tenant = '…'", title_justify="left")
    for column in ("what", "µs per queue"):
        table.add_column(column, justify="left" if column == "what" else "right")
    texts = [f"tenant = 'tenant-{number}'" for number in range(10_000)]
    parsing = least_seconds(lambda: [Filter.parse(text) for text in texts], 3)
    filters = [Filter.parse(text) for text in texts]
    index: FilterIndex[int] = FilterIndex()

    def add() -> None:
        for number, parsed in enumerate(filters):
            index.add(number, parsed)

    adding = least_seconds(add, 1)
    replacing = least_seconds(add, 5)
    for what, seconds in (
        ("parse and compile", parsing),
        ("add to the index", adding),
        ("replace in the index", replacing),
    ):
        table.add_row(what, f"{seconds / len(texts) * 1e6:,.1f}")
    return table


def batches() -> Table | None:
    try:
        import pyarrow as pa

        from opendata_queue.filters.arrow import SystemColumns, priority_arrow
    except ImportError:
        return None
    table = Table(title=f"Arrow, batches of {BATCH_ROWS:,} rows", title_justify="left")
    for column in ("filter", "rows per second", "times the compiled function"):
        table.add_column(column, justify="left" if column == "filter" else "right")
    rows = [
        {**HEADERS, "price": f"{number % 20_000 / 100}", "topic": f"logs.web.{number % 500}"}
        for number in range(BATCH_ROWS)
    ]
    headers = pa.array([list(row.items()) for row in rows], pa.map_(pa.string(), pa.string()))
    times = [pa.array([value] * BATCH_ROWS, pa.int64()) for value in SYS]
    for text in FILTERS:
        parsed = Filter.parse(text)

        def in_arrow(parsed: Filter = parsed) -> object:
            return priority_arrow(parsed, headers, SystemColumns(*times))

        def in_python(parsed: Filter = parsed) -> object:
            evaluate = parsed.priority_if_match
            return [evaluate(row, SYS) for row in rows]

        arrow, python = least_seconds(in_arrow, 5), least_seconds(in_python, 5)
        table.add_row(text or "(empty)", f"{BATCH_ROWS / arrow:,.0f}", f"{python / arrow:.1f}")
    return table


def main() -> None:
    console = Console()
    console.print(evaluations())
    console.print(routing())
    console.print(index_upkeep())
    of_batches = batches()
    console.print(of_batches or "Arrow: pyarrow is not installed")


if __name__ == "__main__":
    main()
