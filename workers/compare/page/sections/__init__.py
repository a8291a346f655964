"""The page's sections, one per file. A section returns None if it has nothing to show."""
