"""Retention: what is removed from a root, when, and what that frees (RFC 0010)."""

from odq_compactor.alone import compact_root
from odq_compactor.compactor import RetentionCompactor, look_after
from odq_compactor.dry_run import plan_root
from odq_compactor.finished import deletes_when_done, set_delete_when_done
from odq_compactor.live_shard import IngestRetention, look_after_shard
from odq_compactor.options import CompactorOptions
from odq_compactor.report import REASONS, RetentionReport, RetentionTotals
from odq_compactor.space import free_space_beside

__all__ = [
    "REASONS",
    "CompactorOptions",
    "IngestRetention",
    "RetentionCompactor",
    "RetentionReport",
    "RetentionTotals",
    "compact_root",
    "deletes_when_done",
    "free_space_beside",
    "look_after",
    "look_after_shard",
    "plan_root",
    "set_delete_when_done",
]
