"""TOML as Python's own reader takes it: the standard library reads it but does not write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dumps(values: Mapping[str, Any]) -> str:
    """A table as TOML; what is None is left out, for TOML has no word for it.

    Args:
        values: Text, numbers, truth values, lists of them, and mappings, which become tables.

    Raises:
        TypeError: A value is none of these.
    """
    return "\n".join(_table(values, ())).strip() + "\n"


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    known = {name: value for name, value in values.items() if value is not None}
    inner = {name: value for name, value in known.items() if isinstance(value, Mapping)}
    written = [f"{_key(name)} = {_value(value)}" for name, value in known.items() if name not in inner]
    head = ["", f"[{'.'.join(map(_key, path))}]"] if path else []
    return [
        *head,
        *written,
        *(line for name, table in inner.items() for line in _table(table, (*path, name))),
    ]


def _key(name: str) -> str:
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isascii() and bare.isalnum() else _text(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(name)} = {_value(each)}' for name, each in value.items())} }}"
    raise TypeError(f"{value!r} has no form in TOML: text, numbers, truth values, lists and tables have")


def _text(text: str) -> str:
    """JSON's escapes are TOML's, but for DEL, which TOML wants escaped and JSON does not."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
