"""Requests to programs on this machine."""

from __future__ import annotations

from urllib.request import ProxyHandler, build_opener

OPENER = build_opener(ProxyHandler({}))
"""Everything here is on this machine, whatever the environment says of proxies."""
