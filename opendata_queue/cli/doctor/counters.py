"""Whether the counters of queues say what their rows say."""

from __future__ import annotations

from typing import Final

from odq_encodings import (
    BEING_DELETED,
    BacklogKey,
    FailureKey,
    QueueCounters,
    QueueCountersKey,
    QueueOptionsKey,
    QueueOptionsRecord,
    ScheduleKey,
)
from odq_encodings.record import QueueKey
from opendata_queue.cli.common import plural
from opendata_queue.cli.doctor.findings import Finding, fail, ok
from opendata_queue.cli.inspect.live_rows import QUEUES, LiveRoot

_SMALL: Final = 2_000
_TRIES: Final = 3


async def check_counters(root: LiveRoot) -> list[Finding]:
    """Compare them in queues that are small enough, and count the other queues."""
    compared, too_large = 0, 0
    findings = []
    for queue_id in await root.queue_ids():
        difference = await _difference(root, queue_id)
        if difference is None:
            too_large += 1
            continue
        compared += 1
        if difference:
            name = queue_id.decode(errors="replace")
            findings.append(
                fail(
                    "counters",
                    f"queue {name}: {difference}",
                    "stop its owner and check again; if it stays so, keep a copy of the root and "
                    "report it",
                )
            )
    if not findings:
        skipped = f", {too_large} are too large to count" if too_large else ""
        found = f"those of {plural(compared, 'queue')} agree with their rows{skipped}"
        findings.append(ok("counters", found))
    return findings


async def _difference(root: LiveRoot, queue_id: bytes) -> str | None:
    """What differs: empty if nothing does, none for a queue that is too large."""
    difference: str | None = ""
    for _ in range(_TRIES):
        # Its owner may have committed between our reads.
        difference = await _compared(root, queue_id)
        if not difference:
            break
    return difference


async def _compared(root: LiveRoot, queue_id: bytes) -> str | None:
    keys = [
        QueueCountersKey(queue_id=queue_id).encode(),
        QueueOptionsKey(queue_id=queue_id).encode(),
    ]
    rows = {row.key: row.value for row in await root.get(QUEUES, keys)}
    if keys[0] not in rows:
        return ""
    if keys[1] in rows and QueueOptionsRecord.decode(rows[keys[1]]).flags & BEING_DELETED:
        return ""
    counters = QueueCounters.decode(rows[keys[0]])
    said: dict[str, tuple[int, type[QueueKey]]] = {
        "backlog": (sum(one.rows for one in counters.backlog), BacklogKey),
        "schedule": (counters.scheduled, ScheduleKey),
        "failed": (counters.failed, FailureKey),
    }
    if any(count > _SMALL for count, _ in said.values()):
        return None
    wrong = []
    for what, (count, key) in said.items():
        found = len(await root.scan(QUEUES, key.prefix(queue_id), _SMALL + 1))
        if found != count:
            wrong.append(f"{what} counts {count} and has {found} rows")
    return ", ".join(wrong)
