"""Room for connections: each one is an open file to the system."""

from __future__ import annotations

import logging
from typing import Final

try:
    import resource
except ImportError:  # there is no such limit on Windows
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_FOR_OTHERS: Final = 512
"""Files of the store, and all else that a process has open."""


def make_room_for(connections: int) -> None:
    """Let this process open so many files; warn if the system does not permit it.

    Without room, a server that is asked for one connection too many accepts none at all.
    """
    if resource is None:
        return
    wanted = connections + _FOR_OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:
        logger.warning("could not raise the limit of open files to %d: %s", most, error)
        most = soft
    if most < wanted:
        logger.warning(
            "this system permits %d open files: too few for %d connections, raise it with "
            "`ulimit -n %d` or give a smaller --max-connections",
            most,
            connections,
            wanted,
        )
