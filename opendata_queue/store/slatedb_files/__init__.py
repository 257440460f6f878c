"""SlateDB's own files, read without SlateDB."""
