"""``odq bench``: a quick measurement of a store."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from opendata_queue.api.sync import System
from opendata_queue.cli.bench.workloads import (
    NUMBER_BYTES,
    RETENTION_SECONDS,
    WAIT_MS,
    WORKLOADS,
    own_queue,
    quantile,
    run_workload,
)
from opendata_queue.cli.common import (
    AsJson,
    Store,
    Token,
    note,
    print_json,
    print_table,
    system_at,
)
from opendata_queue.model.errors import InvalidInputError, OdqError
from opendata_queue.model.messages import NewMessage
from opendata_queue.opening import open as open_system


def bench(
    messages: Annotated[
        int, typer.Option("--messages", "-n", min=1, max=10_000_000, help="How many.")
    ] = 10_000,
    size: Annotated[int, typer.Option(min=0, max=10_000_000, help="Bytes of a payload.")] = 256,
    batch: Annotated[int, typer.Option(min=1, max=1_000, help="How many go into one call.")] = 100,
    workloads: Annotated[
        str | None,
        typer.Option(
            "--workloads",
            "-w",
            help=f"As in make bench: all, or some of {','.join(WORKLOADS)}.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3_600, help="How long each workload takes.")
    ] = 2.0,
    namespace: Annotated[
        str | None,
        typer.Option(help="The namespace of its queue, for a token that is not for all of them."),
    ] = None,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Measure publishing, claiming and acking, one call after the other.

    Without --store and ODQ_STORE it uses a temporary root on this machine's disk. On a store of
    yours it makes a queue for itself, whose filter only its own messages satisfy, and deletes it;
    its messages also go to queues that take every message, and have a retention of one hour.

    With --workloads it measures what `make bench` compares with other systems, for --seconds each;
    --messages and --batch don't count then. Every message that comes back is checked.

    Examples:
      odq bench
      odq bench --workloads all --store http://127.0.0.1:8080
      odq bench --store s3://bucket/prefix --messages 2000 --batch 10
      odq bench --store http://127.0.0.1:8080 --token "$TOKEN" --namespace shop
    """
    if workloads is not None:
        _compare(_chosen(workloads), store, token, namespace, size, seconds, as_json)
        return
    with _system(store, token) as system:
        steps = _measure(system, namespace, messages, size, batch)
    if as_json:
        print_json({"messages": messages, "size": size, "batch": batch, "steps": steps})
        return
    columns = ("step", "messages/s", "p50 ms", "p99 ms", "calls")
    print_table(
        columns,
        [
            (
                step["step"],
                f"{step['messages_per_second']:,.0f}",
                f"{step['p50_ms']:.2f}",
                f"{step['p99_ms']:.2f}",
                step["calls"],
            )
            for step in steps
        ],
    )


def _chosen(text: str) -> list[str]:
    if text == "all":
        return list(WORKLOADS)
    wanted = text.upper().split(",")
    if unknown := [one for one in wanted if one not in WORKLOADS]:
        raise InvalidInputError(
            f"there is no workload {unknown[0]!r}: use all, or some of {', '.join(WORKLOADS)}"
        )
    return wanted


def _compare(
    workloads: list[str],
    store: str | None,
    token: str | None,
    namespace: str | None,
    size: int,
    seconds: float,
    as_json: bool,
) -> None:
    if size < NUMBER_BYTES:
        raise InvalidInputError(
            f"--size is {size}: in the workloads every payload has a number of {NUMBER_BYTES} "
            f"bytes, so use {NUMBER_BYTES} or more"
        )
    with _system(store, token) as system:
        found = [run_workload(one, system, namespace, size, seconds) for one in workloads]
    if as_json:
        print_json({"size": size, "seconds": seconds, "workloads": found})
        return
    print_table(
        ("workload", "what", "messages/s", "p50 ms", "p99 ms", "messages"),
        [
            (
                one["workload"],
                one["what"],
                f"{one['messages_per_second']:,.0f}",
                f"{one['p50_ms']:.2f}",
                f"{one['p99_ms']:.2f}",
                one["messages"],
            )
            for one in found
        ],
    )


@contextmanager
def _system(store: str | None, token: str | None) -> Iterator[System]:
    if store:
        with system_at(store, token) as system:
            yield system
        return
    folder = Path(tempfile.mkdtemp(prefix="odq-bench-"))
    note(f"on a temporary root, {folder}")
    try:
        with open_system(folder.as_uri()) as system:
            yield system
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(
    system: System, namespace: str | None, messages: int, size: int, batch: int
) -> list[dict[str, Any]]:
    with own_queue(system, namespace) as (queue, headers):
        return _steps(system, queue, headers, messages, size, batch)


def _steps(
    system: System, queue: str, headers: dict[str, str], messages: int, size: int, batch: int
) -> list[dict[str, Any]]:
    publish, claim, ack = _Step("publish"), _Step("claim"), _Step("ack")
    payload = secrets.token_bytes(size)
    for start in range(0, messages, batch):
        count = min(batch, messages - start)
        new = [
            NewMessage(payload, headers=headers, retention_seconds=RETENTION_SECONDS)
            for _ in range(count)
        ]
        publish.timed(count, partial(system.publish_many, new))
    left = messages
    while left:
        claimed = claim.timed(0, partial(system.claim, queue, batch, wait_ms=WAIT_MS))
        if not claimed:
            raise OdqError(f"{left} of {messages} messages did not come within {WAIT_MS} ms")
        claim.messages += len(claimed)
        ack.timed(len(claimed), partial(system.ack, queue, *claimed))
        left -= len(claimed)
    return [step.result() for step in (publish, claim, ack)]


class _Step:
    """How long the calls of one kind have taken."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages = 0
        self._seconds: list[float] = []

    def timed(self, messages: int, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self._seconds.append(time.perf_counter() - start)
        self.messages += messages
        return result

    def result(self) -> dict[str, Any]:
        ordered = sorted(self._seconds)
        return {
            "step": self.name,
            "messages_per_second": round(self.messages / max(sum(ordered), 1e-9), 1),
            "p50_ms": round(quantile(ordered, 0.5) * 1e3, 3),
            "p99_ms": round(quantile(ordered, 0.99) * 1e3, 3),
            "calls": len(ordered),
        }
