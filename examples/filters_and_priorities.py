"""Queues are filters over headers, and rules of a filter can give priorities.

python examples/filters_and_priorities.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue
from opendata_queue import FilterError, NewMessage

FILTERS = {
    "everything": "",
    "europe": "region IN ('de', 'fr') AND NOT topic LIKE 'internal.%'",
    # The first rule that matches decides. Lower numbers are claimed first; 128 is the default.
    "alerts": "topic LIKE 'alert.%' AND level >= 8 PRIORITY 1; topic LIKE 'alert.%' PRIORITY level",
    "nowhere": "region IS NULL",
}
MESSAGES = [
    NewMessage(b"disk is slow", headers={"topic": "alert.disk", "level": "5", "region": "de"}),
    NewMessage(b"disk is lost", headers={"topic": "alert.disk", "level": "9", "region": "fr"}),
    NewMessage(b"fan is loud", headers={"topic": "alert.fan", "level": "2"}),
    NewMessage(b"lunch is ready", headers={"topic": "internal.lunch", "region": "fr"}),
]


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        for name, filter in FILTERS.items():
            if name not in system.list_queues():
                system.create_queue(name, filter=filter)
        ids = system.publish_many(MESSAGES)
        system.history(ids[-1])  # returns when that message is in its queues

        for name in FILTERS:
            claimed = system.claim(name, 10)
            system.ack(name, *claimed)
            shown = [f"{(one.payload or b'').decode()} ({one.priority})" for one in claimed]
            print(f"{name}: {', '.join(shown)}")

        try:
            system.create_queue("broken", filter="region = de")
        except FilterError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
