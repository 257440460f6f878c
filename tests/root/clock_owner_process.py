"""A process that owns a root, fills it, says so, and is killed.

    python -m tests.root.clock_owner_process URL AHEAD_MS

The clock of its machine is ``AHEAD_MS`` ahead of the real time.
"""

from __future__ import annotations

import asyncio
import sys

from tests.root.test_clocks_in_takeovers import fill, owner


async def main(root: str, ahead_ms: int) -> None:
    await fill(await owner(root, ahead_ms))
    print("filled", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
