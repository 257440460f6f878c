"""Waiting, at the end of the process, for threads of the store's libraries that are in Python.

obstore and SlateDB answer from threads of their own, which call into the event loop. The loop may
go on before such a call has returned, and the process may come to its end: when the thread then
wants to go on in an interpreter that is ending, Python ends the thread, through frames of Rust
that can't bear it, and the whole process aborts, although all was done. So the end waits for them.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from types import FrameType
from typing import Final

_PATIENCE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.001
_QUIET_POLLS: Final = 3
"""So often in a row no thread must be seen: one that has just come, and waits for the
interpreter's lock, is seen only when it has that."""
_CALLED: Final = ("asyncio.", "slatedb.", "obstore.")
"""Where threads of the libraries enter Python."""


def wait_for_last_calls() -> None:
    """Return when no thread of the libraries is in Python any more, or after some seconds."""
    give_up_at = time.monotonic() + _PATIENCE_SECONDS
    quiet_polls = 0
    while quiet_polls < _QUIET_POLLS and time.monotonic() < give_up_at:
        time.sleep(_POLL_SECONDS)
        quiet_polls = 0 if _calls() else quiet_polls + 1


def _calls() -> set[int]:
    """The threads of the libraries that are in Python."""
    ours = {
        thread.ident
        for thread in threading.enumerate()
        # Python makes one of these up for a thread of theirs that has logged something.
        if not isinstance(thread, threading._DummyThread)
    }
    return {
        thread
        for thread, frame in sys._current_frames().items()
        if thread not in ours and _entered_by(frame).startswith(_CALLED)
    }


def _entered_by(frame: FrameType) -> str:
    """The module of the function that a thread called first."""
    while frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


# Registered early, so that it comes late: after what others still do at the end.
atexit.register(wait_for_last_calls)
