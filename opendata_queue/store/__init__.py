"""The store seam: all that touches SlateDB and obstore is in this package."""

from opendata_queue.store.damage.bulk_proof import unproven, withdraw_proof
from opendata_queue.store.damage.check import check_database, repair_database
from opendata_queue.store.damage.salvage import salvage_ssts
from opendata_queue.store.db.bulk_database import BulkDatabase
from opendata_queue.store.db.database import Database
from opendata_queue.store.db.reader import BlockCache, DatabaseReader
from opendata_queue.store.db.reads import DatabaseReads
from opendata_queue.store.db.upkeep import Upkeep
from opendata_queue.store.errors import has_no_database
from opendata_queue.store.files.local import readable_by
from opendata_queue.store.journal.inspection import has_journal
from opendata_queue.store.last_calls import wait_for_last_calls
from opendata_queue.store.location import Location, StoreKind
from opendata_queue.store.objects.abilities import Abilities, Overwrite
from opendata_queue.store.objects.objects import Objects, forget_memory_root
from opendata_queue.store.objects.s3 import S3Access
from opendata_queue.store.problems import Problem
from opendata_queue.store.rows.log_columns import read_log
from opendata_queue.store.rows.packed import AnyRows, PackedRows
from opendata_queue.store.rows.rows import Rows
from opendata_queue.store.rows.scan import Row, ScannedRows
from opendata_queue.store.rows.writer import Tier, active_tier
from opendata_queue.store.settings import StoreSettings

__all__ = [
    "Abilities",
    "AnyRows",
    "BlockCache",
    "BulkDatabase",
    "Database",
    "DatabaseReader",
    "DatabaseReads",
    "Location",
    "Objects",
    "Overwrite",
    "PackedRows",
    "Problem",
    "Row",
    "Rows",
    "S3Access",
    "ScannedRows",
    "StoreKind",
    "StoreSettings",
    "Tier",
    "Upkeep",
    "active_tier",
    "check_database",
    "forget_memory_root",
    "has_journal",
    "has_no_database",
    "read_log",
    "readable_by",
    "repair_database",
    "salvage_ssts",
    "unproven",
    "wait_for_last_calls",
    "withdraw_proof",
]
