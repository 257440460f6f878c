"""The store seam: all that touches SlateDB and obstore is in this package."""

from opendata_queue.store.batch_writer import Tier, active_tier
from opendata_queue.store.database import Database, DatabaseReader, DatabaseReads
from opendata_queue.store.location import Location, StoreKind
from opendata_queue.store.objects import Objects, forget_memory_root
from opendata_queue.store.rows import Rows
from opendata_queue.store.settings import StoreSettings

__all__ = [
    "Database",
    "DatabaseReader",
    "DatabaseReads",
    "Location",
    "Objects",
    "Rows",
    "StoreKind",
    "StoreSettings",
    "Tier",
    "active_tier",
    "forget_memory_root",
]
