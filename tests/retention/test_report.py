"""What is told of passes."""

from __future__ import annotations

from odq_compactor.report import RetentionReport, RetentionTotals


def test_all_passes_add_up_in_the_figures() -> None:
    totals = RetentionTotals()
    for now_ms in (1_000, 2_000):
        report = RetentionReport(now_ms=now_ms, requests=7, duration_ms=500, row_bytes=10)
        report.count("expired messages", 3)
        report.count("done entries", 2, queue="a")
        report.count("done entries", 1, queue="b")
        totals.add(report)

    found = {(one.name, *one.labels): one.value for one in totals.figures()}

    assert found["odq_retention_removed", ("kind", "expired_messages")] == 6
    assert found["odq_retention_removed", ("kind", "done_entries")] == 6
    assert found["odq_retention_requests",] == 14
    assert found["odq_retention_seconds",] == 1
    assert found["odq_retention_row_bytes",] == 20
    assert found["odq_retention_last_pass_timestamp_seconds",] == 2
