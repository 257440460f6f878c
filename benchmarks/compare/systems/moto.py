"""The S3 server of the tests, for all that is measured on object storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.compare.contract import Address
from benchmarks.compare.servers import lacking
from tests.support.s3_server import S3Server

BUCKET: Final = "bench"


def no_moto() -> str | None:
    """Why there is no S3 here, if there is none."""
    return lacking(modules=["moto", "flask", "flask_cors"])


@contextlib.contextmanager
def s3_server(folder: Path, relaxed: bool) -> Iterator[Address]:
    """The address is the environment that clients need."""
    with S3Server() as moto:
        moto.create_bucket(BUCKET)
        yield moto.environment()
