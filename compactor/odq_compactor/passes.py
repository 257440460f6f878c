"""Passes, one after the other, in the background of a process that serves callers."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from odq_compactor.options import CompactorOptions
from odq_compactor.report import RetentionReport, RetentionTotals
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import ClosedError, FencedError, OdqError

logger = logging.getLogger(__name__)


class Passes(ABC):
    """``run_once`` is one pass; ``run_for_ever`` makes one after the other. They never overlap."""

    def __init__(self, machine: Clock, options: CompactorOptions) -> None:
        self._machine = machine
        self._options = options
        self._swept_at: int | None = None
        self._passing = asyncio.Lock()
        self.totals = RetentionTotals()

    async def run_for_ever(self) -> None:
        """Make passes until they are cancelled. What fails is tried again in the next one.

        It rests before the first one: a process that opens a root for a moment needs none.
        """
        clock = self._machine
        while True:
            await clock.wait_until(clock.now_ms() + self._options.interval_ms)
            try:
                await self.run_once()
            except (FencedError, ClosedError) as error:
                logger.info("retention has stopped: %s", error)  # callers get it, too
                return
            except OdqError as error:
                self.totals.failures += 1
                logger.warning("retention goes on later: %s", error)
            except Exception:
                # A defect here must not end what consumers need.
                self.totals.failures += 1
                logger.exception("retention goes on later")

    async def run_once(self, *, thorough: bool = False) -> RetentionReport:
        """One pass. A thorough one also does what is due only now and then, and has patience."""
        async with self._passing:
            loop = asyncio.get_running_loop()
            started, requests = loop.time(), self._requests()
            report = RetentionReport(now_ms=self._now_ms())
            rarely = thorough or self._rarely_is_due(report.now_ms)
            whole = False
            try:
                await self._pass(report, rarely=rarely, thorough=thorough)
                whole = True
            finally:  # what one that fails has removed is gone, too
                report.duration_ms = round((loop.time() - started) * 1000)
                report.requests = self._requests() - requests
                self.totals.add(report, whole=whole)
            if rarely:
                self._swept_at = report.now_ms
            return report

    def _rarely_is_due(self, now: int) -> bool:
        return self._swept_at is None or now - self._swept_at >= self._options.sweep_interval_ms

    @abstractmethod
    async def _pass(self, report: RetentionReport, *, rarely: bool, thorough: bool) -> None: ...

    @abstractmethod
    def _now_ms(self) -> int: ...

    @abstractmethod
    def _requests(self) -> int:
        """How many requests this process has made so far."""
