"""How a broker logs: text for people, or a line of JSON for each event."""

from __future__ import annotations

import logging
import sys
from typing import Final

from opendata_queue.model.safe_text import HarmlessLines, harmless_json, json_text

ACCESS_LOGGER: Final = "opendata_queue.access"


class JsonLines(logging.Formatter):
    """One JSON document on a line. Those of requests are that already."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == ACCESS_LOGGER:
            return harmless_json(message)
        line = {
            "time_ms": round(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_text(line)


def log_to_stderr(*, as_json: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else HarmlessLines("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
