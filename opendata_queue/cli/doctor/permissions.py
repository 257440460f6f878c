"""The check of ``odq doctor`` for who else can read a root on a disk."""

from __future__ import annotations

from opendata_queue.cli.doctor.findings import Finding, ok, warn
from opendata_queue.store import Location, readable_by

_CHECK = "permissions"


def check_permissions(location: Location) -> Finding:
    """Messages, and the secret that makes receipts, are for those who may read the root."""
    folder = location.folder
    others = readable_by(folder)
    if not others:
        return ok(_CHECK, "only its owner can read the root's folder")
    return warn(
        _CHECK,
        f"{others} can read {folder}, with all messages and the secret of its receipts",
        f"chmod 700 {folder}, unless they are meant to",
    )
