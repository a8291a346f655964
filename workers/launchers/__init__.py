"""Reads the environment variables of each launcher family; `placement` chooses among the families."""
