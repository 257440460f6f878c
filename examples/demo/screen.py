"""What the demo shows: a live picture on a terminal, lines of text elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from examples.demo.shop import FILTERS
from opendata_queue import QueueStats

Stats = dict[str, QueueStats]

_STYLES: Final = {"✓": "green", "↻": "yellow", "✗": "bold red", "!": "bold magenta"}
_BARS: Final = " ▁▂▃▄▅▆▇█"
_FEED_LINES: Final = 8
_RATES: Final = 48
_LEAST_COLUMNS: Final = 70
_WIDE_COLUMNS: Final = 110


class Screen(ABC):
    """Where the demo tells its story. ``tell`` may be called from any thread."""

    is_live: bool

    @abstractmethod
    def title(self, text: str) -> None: ...

    @abstractmethod
    def say(self, text: str, sign: str = "") -> None: ...

    @abstractmethod
    def tell(self, sign: str, queue: str, text: str) -> None: ...

    @abstractmethod
    def frame(self, stats: Stats) -> None: ...

    @abstractmethod
    @contextmanager
    def picture(self) -> Iterator[None]:
        """Show frames within."""


def screen_for_here() -> Screen:
    """The picture needs a terminal that can move its cursor, and room."""
    console = Console(highlight=False)
    plain = (
        not sys.stdout.isatty()
        or bool(os.environ.get("NO_COLOR"))
        or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        or console.width < _LEAST_COLUMNS
    )
    return PlainScreen() if plain else LiveScreen(console)


class PlainScreen(Screen):
    """Lines of text: what is worth telling, and where the messages are, once a second."""

    is_live = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._shown = time.monotonic()
        self._told: dict[str, int] = {}

    def title(self, text: str) -> None:
        self._print(f"\n== {text}")

    def say(self, text: str, sign: str = "") -> None:
        self._print(f"{sign} {text}".strip())

    def tell(self, sign: str, queue: str, text: str) -> None:
        with self._lock:
            # All that goes well would be hundreds of lines: the first two of each kind are enough.
            told = self._told[sign + queue] = self._told.get(sign + queue, 0) + 1
        if sign in "✗!" or told <= 2:
            self._print(f"  {sign} {queue}: {text}")

    def frame(self, stats: Stats) -> None:
        now = time.monotonic()
        if now - self._shown < 1:
            return
        self._shown = now
        self._print(f"after {now - self._begun:.0f} s")
        for name, one in stats.items():
            self._print(
                f"  {name}: {one.available} available, {one.delayed} delayed, "
                f"{one.in_flight} in flight, {one.done} done, {one.failed} failed"
            )

    @contextmanager
    def picture(self) -> Iterator[None]:
        yield

    def _print(self, line: str) -> None:
        with self._lock:
            encoding = sys.stdout.encoding or "utf-8"
            print(line.encode(encoding, "replace").decode(encoding), flush=True)


class LiveScreen(Screen):
    """A table of the queues, how fast they go, and what has just happened."""

    is_live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._title = ""
        self._feed: deque[Text] = deque(maxlen=_FEED_LINES)
        self._done: deque[tuple[float, int]] = deque(maxlen=10)
        self._rates: deque[float] = deque(maxlen=_RATES)

    def title(self, text: str) -> None:
        self._title = text
        if self._live is None:
            self._console.print()
            self._console.print(Rule(Text(text, "bold cyan"), align="left", style="cyan"))

    def say(self, text: str, sign: str = "") -> None:
        line = Text.assemble((f"{sign} ", _STYLES.get(sign, "")) if sign else "", text)
        self._console.print(line, soft_wrap=True)

    def tell(self, sign: str, queue: str, text: str) -> None:
        style = _STYLES.get(sign, "")
        self._feed.append(
            Text.assemble((f" {sign} ", style), (f"{queue:<10}", "cyan"), (text, style))
        )

    def frame(self, stats: Stats) -> None:
        if self._live is None:
            return
        self._measure(sum(one.done for one in stats.values()))
        self._live.update(self._drawn(stats), refresh=True)

    @contextmanager
    def picture(self) -> Iterator[None]:
        with Live(console=self._console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def _measure(self, done: int) -> None:
        self._done.append((time.monotonic(), done))
        (begun, at_first), (now, at_last) = self._done[0], self._done[-1]
        self._rates.append((at_last - at_first) / (now - begun) if now > begun else 0)

    def _drawn(self, stats: Stats) -> RenderableType:
        feed = list(self._feed)
        feed += [Text()] * (_FEED_LINES - len(feed))
        for line in feed:
            line.truncate(self._console.width - 4, overflow="ellipsis")
        return Panel(
            Group(self._table(stats), self._rate_line(), Rule(style="dim"), *feed),
            title=Text(self._title, "bold cyan"),
            title_align="left",
            border_style="cyan",
            padding=(0, 1),
        )

    def _table(self, stats: Stats) -> Table:
        table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 0, 0, 1))
        table.add_column("queue", style="cyan", no_wrap=True)
        if self._console.width >= _WIDE_COLUMNS:
            table.add_column("filter", style="dim", no_wrap=True)
        for name in ("available", "delayed", "in flight", "done", "failed", "oldest"):
            table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
        for name, one in stats.items():
            filter = [FILTERS[name] or "(all)"] if len(table.columns) > 7 else []
            table.add_row(name, *filter, *_counts(one))
        return table

    def _rate_line(self) -> Text:
        most = max([*self._rates, 1])
        bars = "".join(_BARS[round(rate / most * (len(_BARS) - 1))] for rate in self._rates)
        now = self._rates[-1] if self._rates else 0
        return Text.assemble((f"{now:5.0f} done/s ", "bold"), (bars, "green"))


def _counts(stats: QueueStats) -> list[Text]:
    age_ms = stats.oldest_age_ms
    return [
        _count(stats.available, "bold"),
        _count(stats.delayed, "yellow"),
        _count(stats.in_flight, "magenta"),
        _count(stats.done, "green"),
        _count(stats.failed, "bold red"),
        Text("-" if age_ms is None else f"{age_ms / 1000:.1f} s", "" if age_ms else "dim"),
    ]


def _count(number: int, style: str) -> Text:
    return Text(f"{number:,}", style if number else "dim")
