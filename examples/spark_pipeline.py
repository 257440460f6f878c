"""A pipeline with Spark: from Parquet to workers, and back to Parquet.

    python examples/spark_pipeline.py [URL]

It needs `pip install 'opendata-queue[spark]'` and Java 17. The parts are separated like the cells
of a notebook. docs/spark.md explains them, and says what differs on a cluster.
"""

# ruff: noqa: E402

# %% A session. Spark's workers must run the Python that has the package.
import os
import sys
import tempfile

from pyspark.sql import SparkSession

folder = tempfile.mkdtemp()
root = sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/root"

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")

# %% The broker of this example. It would run elsewhere: Spark never talks to it.
import opendata_queue as odq

system = odq.open(root)
system.create_queue("emea-orders", filter="type = 'order' AND region = 'emea'")

# %% Orders in Parquet, as they come out of a lake.
orders = spark.range(0, 1_000, 1, 2).selectExpr(
    "id AS order",
    "if(id % 4 = 0, 'emea', 'apj') AS region",
    "round(id * 1.5, 2) AS price",
)
orders.write.parquet(f"{folder}/orders")

# %% Append them: one line, exactly once. Under the same jobId a second run does nothing.
messages = spark.read.parquet(f"{folder}/orders").selectExpr(
    "to_json(struct(*)) AS payload", "'order' AS type", "region", "cast(price AS string) AS price"
)
for _ in range(2):
    (
        messages.write.format("opendata_queue")
        .mode("append")
        .option("path", root)
        .option("headerColumns", "type,region,price")
        .option("jobId", "orders-2026-11-16")
        .save()
    )

# %% Workers get them, and know nothing of Spark.
handled = 0
while handled < 250:
    claimed = system.claim("emea-orders", 100, wait_ms=60_000)
    system.ack("emea-orders", *claimed)
    handled += len(claimed)
print(handled, "orders were handled")


# %% Back in Spark: what was done, next to what it was.
def table(name: str, **options: str):  # type: ignore[no-untyped-def]
    reader = spark.read.format("opendata_queue").option("path", root).option("table", name)
    return reader.options(**options).load()


done = table("done").join(table("messages", payloads="true"), "message_id")
done.selectExpr("get_json_object(string(payload), '$.order') AS order", "done_at").write.parquet(
    f"{folder}/handled"
)
print(spark.read.parquet(f"{folder}/handled").count(), "are in Parquet again")

# %% A filter is a column: what would a queue of expensive orders have received?
from opendata_queue.spark import filter_column

expensive = table("messages").where(filter_column("price >= 1000 AND region = 'emea'"))
print(expensive.count(), "orders are expensive")

# %%
system.close()
spark.stop()
