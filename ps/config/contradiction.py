"""The error for a setting that requires another one."""

from __future__ import annotations

from hubring.ps.core.errors import ConfigError


def only_with(given: str, needed: str, present: str) -> ConfigError:
    """Makes the error for setting `given`, which requires `needed` but is combined with `present`."""
    return ConfigError(f"{given} requires {needed}, not {present}; change one of the two")
