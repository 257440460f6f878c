"""Spark's daemon of Python workers, for tests.

Workers are forked from it, so whatever it has imported they need not import: that is most of the
time that a small job takes. Nothing of the store may have been opened before the fork.
"""

from __future__ import annotations

import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import opendata_queue.spark.data_source  # noqa: F401

if __name__ == "__main__":
    manager()
