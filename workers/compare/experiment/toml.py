"""An experiment as TOML, which `ps-compare run` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w


def dumps(values: Mapping[str, Any]) -> str:
    """Returns a table as TOML, without values that are None, which TOML cannot express.

    Raises:
        TypeError: A value is not text, a number, a Boolean, a list of them or a mapping.
    """
    return tomli_w.dumps(_known(values))


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _known(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }
