"""What is said where one setting makes another meaningless."""

from __future__ import annotations

from hubring.ps.core.errors import ConfigError


def only_with(given: str, needed: str, present: str) -> ConfigError:
    """`given` was, but means something only with `needed`, and what is there is `present`."""
    return ConfigError(f"{given} means something only with {needed}, but there is {present}: drop one")
