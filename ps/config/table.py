"""Generates deploy/SETTINGS.md, the list of all settings.

python -m hubring.ps.config.table > deploy/SETTINGS.md
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from hubring.ps.config.declaration import declared, default
from hubring.ps.config.settings import allowed, flag
from hubring.ps.config.sources import TABLES


def page() -> str:
    """Returns the page in Markdown."""
    return _PAGE + "".join(
        f"\n## {program}, table `[{name}]`\n\n{_HEAD}{''.join(rows(TABLES[name]))}"
        for name, program in _PROGRAMS.items()
    )


def rows(config: type[Struct]) -> Iterator[str]:
    """Yields a table row for each setting of a config."""
    for field, text in declared(config):
        name, unset = field.name, "false" if field.default is False else "none"
        named = f"`{flag(name)}` | `PS_{name.upper()}` | `{name}`"
        yield f"| {named} | {allowed(field.type)} | {default(field, text) or unset} | {text.help} |\n"


_PROGRAMS = {"server": "`ps-server start`", "worker": "`ps-worker`", "submit": "`ps-server submit`"}
_HEAD = """\
| flag | variable | TOML key | value | default | meaning |
| --- | --- | --- | --- | --- | --- |
"""
_PAGE = """\
# Settings

Every setting is a flag, an environment variable and a key in a TOML file. A flag overrides the variable, the
variable overrides the file, and the file overrides the default. Name the file with `--config` or `PS_CONFIG`.

`ps-server submit` also accepts flags of `ps-server start` and `ps-worker`: see `ps-server submit --help`.

This page is generated from `ps/config/`: `python -m hubring.ps.config.table > deploy/SETTINGS.md`.
"""


if __name__ == "__main__":
    print(page(), end="")
