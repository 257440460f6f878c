"""Where Spark finds the format ``opendata_queue`` by itself.

Spark imports every module whose name begins with ``pyspark_`` and takes its ``DefaultSource``. So
with this package installed nothing has to be registered.
"""

from opendata_queue.spark.data_source import OpendataQueueSource as DefaultSource

__all__ = ["DefaultSource"]
