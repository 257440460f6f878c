"""A process ends well though threads of the store's libraries are still about to return."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from opendata_queue.store import Objects, StoreSettings, last_calls

LAST: dict[str, Callable[[Objects], Coroutine[Any, Any, Any]]] = {
    "write": lambda objects: objects.write("x", b""),
    "read": lambda objects: objects.read("x"),
    "list": lambda objects: objects.names("x"),
}


class HeldUp(asyncio.SelectorEventLoop):
    """Calls from other threads wake it as usual, and return when they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.let_go.set()
        self._own_thread = threading.get_ident()

    def _write_to_self(self) -> None:
        super()._write_to_self()  # type: ignore[misc]
        if threading.get_ident() != self._own_thread:
            threading.current_thread()  # as whatever logs does
            self.let_go.wait()


@pytest.mark.parametrize("last", LAST)
def test_calls_that_have_not_returned_are_waited_for(last: str) -> None:
    async def main(loop: HeldUp) -> None:
        objects = Objects.open("memory:///", StoreSettings())
        loop.let_go.clear()
        await LAST[last](objects)
        assert last_calls._calls()
        waiting = threading.Thread(target=last_calls.wait_for_last_calls)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        loop.let_go.set()
        waiting.join(120)
        assert not waiting.is_alive()

    with asyncio.Runner(loop_factory=HeldUp) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, HeldUp)
        runner.run(main(loop))


def test_other_threads_are_not_waited_for() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.to_thread(go_on.wait)

    other = threading.Thread(target=asyncio.run, args=[wait()])
    other.start()
    begun.wait()

    assert other.ident not in last_calls._calls()

    go_on.set()
    other.join(120)


SCRIPT = """
import opendata_queue
with opendata_queue.open("memory:///") as system:
    system.create_queue("q")
"""


def test_it_is_done_at_the_end_of_a_process() -> None:
    script = f"import atexit\natexit.register(print, 'before')\n{SCRIPT}\n" + (
        "from opendata_queue.store import last_calls\nlast_calls._calls = lambda: print('polled')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stdout) == (0, "polled\n" * 3 + "before\n"), done.stderr
