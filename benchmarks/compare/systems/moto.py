"""The S3 server of the tests, for all that is measured on object storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.compare.contract import Address
from tests.s3_server import S3Server

BUCKET: Final = "bench"


@contextlib.contextmanager
def s3_server(folder: Path, relaxed: bool) -> Iterator[Address]:
    """The address is the environment that clients need."""
    with S3Server() as moto:
        moto.create_bucket(BUCKET)
        yield moto.environment()
