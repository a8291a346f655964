"""Requests to programs on this machine."""

from __future__ import annotations

from urllib.request import ProxyHandler, build_opener

OPENER = build_opener(ProxyHandler({}))
"""Opens addresses on this machine, and ignores proxy variables."""
