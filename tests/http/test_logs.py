"""What a broker logs can be read by a machine."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import opendata_queue
from opendata_queue.http.requests.logs import ACCESS_LOGGER, JsonLines
from tests.support.broker import BrokerProcess


def test_every_line_of_a_broker_is_json(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    with BrokerProcess(root, "--log-json", "--access-log") as broker:
        with opendata_queue.open(broker.url) as system:
            message_id = system.publish(b"x")
        with opendata_queue.open(root, takeover=True):
            assert broker.wait() == 1

    lines = [json.loads(line) for line in broker.complaints.splitlines()[:-1]]
    requests = [line for line in lines if line.get("route") == "/v1/publish"]
    assert requests[0]["message_ids"] == [str(message_id)]
    assert any(line.get("level") == "error" and "stopped" in line["message"] for line in lines)


def test_an_exception_is_one_line() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("odq", logging.ERROR, "file", 1, "failed: %s", ("x",), info)

    line = JsonLines().format(record)

    assert "\n" not in line
    told = json.loads(line)
    assert told["message"] == "failed: x"
    assert "ValueError: no" in told["exception"]
    record.name, record.exc_info = ACCESS_LOGGER, None
    assert JsonLines().format(record) == "failed: x"
