"""Reads the variables of each launcher that Hubring knows; `placement` chooses among the launchers."""
