"""Objects that are no SlateDB database, and what an object store can do."""
