"""The store seam: all that touches SlateDB and obstore is in this package."""

from opendata_queue.store.abilities import Abilities, Overwrite
from opendata_queue.store.batch_reader import Row, ScannedRows
from opendata_queue.store.batch_writer import Tier, active_tier
from opendata_queue.store.bulk_database import BulkDatabase
from opendata_queue.store.bulk_proof import unproven, withdraw_proof
from opendata_queue.store.check import check_database, repair_database
from opendata_queue.store.database import BlockCache, Database, DatabaseReader, DatabaseReads
from opendata_queue.store.figures import Distribution, Figure
from opendata_queue.store.journal import has_journal
from opendata_queue.store.last_calls import wait_for_last_calls
from opendata_queue.store.local_files import readable_by
from opendata_queue.store.location import Location, StoreKind
from opendata_queue.store.log_columns import read_log
from opendata_queue.store.objects import Objects, forget_memory_root
from opendata_queue.store.packed_rows import AnyRows, PackedRows
from opendata_queue.store.problems import Problem
from opendata_queue.store.rows import Rows
from opendata_queue.store.s3_access import S3Access
from opendata_queue.store.settings import StoreSettings
from opendata_queue.store.sst_salvage import salvage_ssts
from opendata_queue.store.translation import NO_DATABASE
from opendata_queue.store.upkeep import Upkeep

__all__ = [
    "NO_DATABASE",
    "Abilities",
    "AnyRows",
    "BlockCache",
    "BulkDatabase",
    "Database",
    "DatabaseReader",
    "DatabaseReads",
    "Distribution",
    "Figure",
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
    "read_log",
    "readable_by",
    "repair_database",
    "salvage_ssts",
    "unproven",
    "wait_for_last_calls",
    "withdraw_proof",
]
