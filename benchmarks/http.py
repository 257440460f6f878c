"""How fast a broker is over HTTP, next to the same engine in one process.

    python -m benchmarks.http [--seconds 2] [--root DIR] [--quick]

The rounds are in ``over_http.py``. This file has the name under which they are run, and
steps aside for the standard library's ``http``, which it hides from every script of this folder.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    from benchmarks.over_http import main

    main()
elif __name__ == "http":
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    del sys.modules["http"]
    import http

    sys.modules["http"] = http
