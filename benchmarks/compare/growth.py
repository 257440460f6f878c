"""How costs grow: with the backlog, the history, queues, headers, payloads and consumers.

Every figure is of a fresh process on ``file:///``, synced: see ``growth_worker``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.processes import process, result
from benchmarks.compare.report import Target, table

LOOKS: Final = 3
"""How many fresh processes open a root; the median counts."""

Say = Callable[[str], None]
Rows = list[dict[str, float]]

STAY_S: Final = 3.0
"""How long the last of them stays: compactions that were left to do begin after a second."""

_USUAL: Final = 100_000

_LOOKED: Final = ("open_ms", "memory_mib", "peak_mib", "commit_kib", "claim_1_us", "claim_100_us")
_SAID: Final = {
    "waiting": "messages waiting",
    "done": "messages done",
    "queues": "idle queues",
    "open_ms": "first message after ms",
    "memory_mib": "memory MiB",
    "peak_mib": "at most MiB",
    "commit_kib": "KiB per commit",
    "claim_1_us": "claim+ack ×1 µs",
    "claim_100_us": "claim+ack ×100 µs/msg",
    "headers": "headers",
    "bytes": "payload bytes",
    "publish_us": "publish µs/msg",
    "consume_us": "claim+ack µs/msg",
    "log_bytes": "bytes written to the log/msg",
    "queue_bytes": "bytes written to the queue/msg",
    "consumers": "consumers",
    "rate": "claim+ack ×10 msg/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
}


class Growth:
    """Goes through all that may grow."""

    def __init__(self, root: Path, *, quick: bool, deep: bool, say: Say) -> None:
        self._root = root
        self._quick = quick
        self._deep = deep
        self._say = say
        self.looks = 1 if quick else LOOKS

    def measure(self, kinds: Sequence[str], found: dict[str, Rows]) -> None:
        known: dict[str, Callable[[], Rows]] = {
            "backlog": lambda: self._grown("fill", "waiting", self._decades(3, 6, 7)),
            "history": lambda: self._grown("live", "done", self._decades(3, 5, 6)),
            "queues": lambda: self._grown("make_queues", "queues", self._decades(1, 4, 5)),
            "headers": self._headers,
            "payload": self._payloads,
            "consumers": self._consumers,
        }
        for kind in kinds:
            found[kind] = known[kind]()

    def _headers(self) -> Rows:
        return [self._kind(number, headers=number, bytes=256) for number in self._few(0, 4, 16, 64)]

    def _payloads(self) -> Rows:
        return [
            self._kind(size, headers=2, bytes=size)
            for size in self._few(64, 1_024, 16_384, 65_535, 262_144, 1_048_576, 10_485_760)
        ]

    def _decades(self, first: int, usual: int, deep: int) -> list[int]:
        last = first + 1 if self._quick else deep if self._deep else usual
        return [10**exponent for exponent in range(first, last + 1)]

    def _few(self, *values: int) -> Sequence[int]:
        return values[:2] if self._quick else values

    def _grown(self, step: str, what: str, sizes: Sequence[int]) -> Rows:
        """One root that gets larger and larger, measured in between."""
        url = f"file://{self._root}/{what}"
        rows = []
        for size in sizes:
            self._say(f"growth: {size:,} {_SAID[what]}")
            looks = []
            for left in reversed(range(self.looks)):
                self._run(step=step, url=url, **{what: size})
                stay_s = 0.0 if left or self._quick else STAY_S
                looks.append(self._run(step="look", url=url, stay_s=stay_s))
            middle = {name: statistics.median(one[name] for one in looks) for name in _LOOKED}
            middle["peak_mib"] = max(one["peak_mib"] for one in looks)
            rows.append({what: size, **middle})
        return rows

    def _kind(self, name: int, *, headers: int, bytes: int) -> dict[str, float]:
        self._say(f"growth: {headers} headers, {bytes:,} bytes")
        found = self._run(
            step="one_kind",
            url=f"file://{self._root}/kind-{headers}-{bytes}",
            headers=headers,
            bytes=bytes,
            most_bytes=1_000_000 if self._quick else 50_000_000,
        )
        return {"headers": headers, "bytes": bytes, **found}

    def _consumers(self) -> Rows:
        rows = []
        for number in self._few(1, 4, 16, 64, 256):
            self._say(f"growth: {number} consumers")
            url = f"file://{self._root}/consumers-{number}"
            self._run(step="fill", url=url, waiting=2_000 if self._quick else 20_000)
            found = self._run(
                step="consumers", url=url, consumers=number, seconds=0.2 if self._quick else 1.0
            )
            rows.append({"consumers": number, **found})
        return rows

    @staticmethod
    def _run(**spec: Any) -> dict[str, Any]:
        with process("benchmarks.compare.growth_worker", spec) as worker:
            found: dict[str, Any] = result(worker, timeout_s=3_600)
        return found


def growth_lines(found: Mapping[str, Rows], looks: int = 0) -> list[str]:
    """Tables; how many processes have measured a root is said if it is known."""
    lines: list[str] = []
    if looks == 1:
        lines += ["", "Every figure was measured once."]
    elif looks:
        lines += [
            "",
            f"With a backlog, a history and queues, figures are the median of {looks} fresh",
            "processes, and *at most* is the most of all of them. The others were measured once.",
        ]
    for rows in found.values():
        header = [_SAID[name] for name in rows[0]]
        lines += ["", *table(header, [[_shown(value) for value in row.values()] for row in rows])]
    return lines[1:]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def growth_targets(found: Mapping[str, Rows]) -> list[Target]:
    """Of the least backlog and the largest; noise of a disk is no growth.

    A root that fits into one file is opened in less time than any other. So the time to open is
    measured by that with 100,000 messages.
    """
    if "backlog" not in found:
        return []
    first, *between, last = found["backlog"]
    usual = next((row for row in between if row["waiting"] == _USUAL), first)
    in_all = Target(
        what=f"{_SAID['open_ms']}, {last['waiting']:,.0f} waiting",
        target="less than 3,000",
        measured=f"{last['open_ms']:,.0f}",
        met=last["open_ms"] < 3_000,
    )
    return [
        in_all,
        *(
            _stays(name, most, base, last)
            for name, most, base in (
                ("open_ms", 3, usual),
                ("memory_mib", 1.3, first),
                ("peak_mib", 2.5, first),
                ("commit_kib", 1.2, first),
            )
        ),
    ]


def _stays(name: str, most: float, base: Mapping[str, float], last: Mapping[str, float]) -> Target:
    times = last["waiting"] / base["waiting"]
    return Target(
        what=f"{_SAID[name]}, {last['waiting']:,.0f} waiting",
        target=f"less than {most:g} × that with {base['waiting']:,.0f}",
        measured=f"{last[name] / base[name]:.2f} × for {times:,.0f} × the messages",
        met=last[name] < most * base[name],
    )
