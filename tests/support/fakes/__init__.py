"""Fakes of Hubring's parts and of a GPU."""
