"""The page for data engineers names what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pyspark_opendata_queue
from opendata_queue.spark import OpendataQueueSource, options
from opendata_queue.spark.append import build_parser
from opendata_queue.spark.read import reader, stream_reader
from opendata_queue.spark.rows.columns import KNOWN
from opendata_queue.spark.schemas import TABLES

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()


@pytest.mark.parametrize(
    "name",
    sorted(
        {*options.WRITE_OPTIONS, *reader.READ_OPTIONS, *stream_reader.STREAM_OPTIONS, *TABLES}
        | set(KNOWN)
    ),
)
def test_every_option_table_and_column_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE or f'"{name}"' in PAGE


def test_the_python_blocks_are_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    assert len(blocks) >= 5
    for block in blocks:
        ast.parse(block)


def test_the_commands_can_be_parsed() -> None:
    commands = re.findall(r"^\$ odq spark append (.*)$", PAGE, re.MULTILINE)

    assert len(commands) == 2
    for command in commands:
        told = build_parser().parse_args(command.split())
        assert told.inputs


def test_spark_finds_the_format_by_itself() -> None:
    assert pyspark_opendata_queue.DefaultSource is OpendataQueueSource
