"""Messages as columns, for Arrow and for rows of the store."""
