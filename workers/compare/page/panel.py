"""Panels: the rows that are shown next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hubring.workers.compare.experiment.row import meets
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.result.findings import Entry, Findings
from hubring.workers.compare.result.setting_text import words


@dataclass(frozen=True, slots=True)
class Panel:
    """A setting with its rows, and with rows of other settings that it does not affect.

    A ring has no servers and a single process no links, so they run once for all settings that differ only
    in these.
    """

    setting: str
    title: str
    entries: Sequence[Entry]


def panels(findings: Findings) -> list[Panel]:
    """Returns a panel for every setting, except those whose rows are all shown in other panels."""
    borrowed = {key: _borrowed(findings, key) for key in findings.setting_keys}
    lent = {id(entry) for entries in borrowed.values() for entry in entries}
    shown = [key for key in borrowed if any(id(entry) not in lent for entry in findings.under(key))]
    order = {row: place for place, row in enumerate(findings.row_names)}
    return [
        Panel(
            key,
            words(findings.setting(key), key),
            sorted([*findings.under(key), *borrowed[key]], key=lambda entry: order[entry.row]),
        )
        for key in shown
    ]


def _borrowed(findings: Findings, key: str) -> list[Entry]:
    there, setting = {entry.row for entry in findings.under(key)}, findings.setting(key)
    fitting: dict[str, Entry] = {}
    for entry in findings.rows:
        if entry.row not in there and unaffected(entry.row, findings.setting(entry.setting), setting):
            fitting.setdefault(entry.row, entry)
    return list(fitting.values())


def unaffected(row: str, one: Setting, other: Setting) -> bool:
    """Whether a run of this row is the same in both settings."""
    return meets(row, one) == meets(row, other)
