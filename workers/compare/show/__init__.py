"""Findings as a page, as text on the terminal, and as files for other tools."""
