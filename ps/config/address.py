"""Addresses: parsing, and whether an address is loopback."""

from __future__ import annotations

import ipaddress
import re

from hubring.ps.config.file_name import shown
from hubring.ps.core.errors import ConfigError

_ADDRESS = re.compile(r"(\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<name>[^\[\]:/@\s]+)):(?P<port>[0-9]{1,5})")


def address(text: str) -> tuple[str, int]:
    """Splits `HOST:PORT`. An IPv6 host is in brackets: `[::1]:5555`.

    Raises:
        ConfigError: `text` is not `HOST:PORT`, or the port is not from 1 to 65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ConfigError(
            f"address {shown(text)!r}: expected HOST:PORT with a port from 1 to 65535, "
            "as in 127.0.0.1:5555 or [::1]:5555"
        )
    return match["six"] or match["name"], int(match["port"])


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can connect to a listener on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
