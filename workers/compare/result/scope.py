"""What the verdict looks at: the rows of one setting, and how people call that setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hubring.workers.compare.result.ratio import Number, Ratio, ratio

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scope:
    """One setting with its rows, as in `results.json`.

    Attributes:
        setting: Its fields and key.
        rows: Its rows, in order.
        words: What tells it from the other settings; None where there is no other.
    """

    setting: Entry
    rows: Sequence[Entry]
    words: Sequence[str] | None

    @property
    def names(self) -> list[str]:
        """The rows' names."""
        return [row["row"] for row in self.rows]

    def row(self, name: str) -> Entry:
        """The row of that name."""
        return next(row for row in self.rows if row["row"] == name)

    def number(self, row: str, name: str) -> Number | None:
        """A row's number; None if it has none, or there is no such row."""
        if row not in self.names:
            return None
        number: Number | None = self.row(row)["numbers"][name]
        return number

    def ratio(self, name: str, first: str, second: str) -> Ratio | None:
        """A number of one row by that of another; None if one has none."""
        one, other = self.number(first, name), self.number(second, name)
        return None if one is None or other is None else ratio(one, other)

    def say(self, sentence: str, besides: str = "") -> str:
        """The sentence, with where it holds.

        Args:
            sentence: Begins in lower case.
            besides: A part of where that the sentence itself says.
        """
        where = None if self.words is None else [word for word in self.words if word != besides]
        if where:
            return f"With {', '.join(where)}: {sentence}"
        if where is not None and not besides:
            return f"In the plain setting: {sentence}"
        if sentence.split()[0].strip(",") in self.names:  # a row keeps the spelling of its name
            return sentence
        return f"{sentence[0].upper()}{sentence[1:]}"


def scopes(results: Mapping[str, Any]) -> list[Scope]:
    """All settings with their rows."""
    settings = results["settings"]
    shared = set.intersection(*(set(_words(setting)) for setting in settings))
    return [
        Scope(
            setting,
            [row for row in results["rows"] if row["setting"] == setting["key"]],
            [word for word in _words(setting) if word not in shared] if len(settings) > 1 else None,
        )
        for setting in settings
    ]


def listed(words: Sequence[str], last: str = "and") -> str:
    """Words as a sentence lists them."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _words(setting: Entry) -> list[str]:
    """A setting in words."""
    words = [_count(setting["workers"], "worker"), _count(setting["servers"], "server")]
    if link := setting["link"]:
        words += [f"links of {link['rate'] / 1e6:g} Mbit/s"] if link["rate"] else []
        words += [f"{1e3 * link['latency']:g} ms of latency"] if link["latency"] else []
    words += [straggler(setting["straggler"])] if setting["straggler"] else []
    if fault := setting["fault"]:
        words.append(f"worker {fault['rank']} killed at step {fault['step']}")
    if setting["compute"] is not None:
        words.append(f"{1e3 * setting['compute']:g} ms of computing emulated")
    return words


def straggler(slow: Entry) -> str:
    """A straggler in words."""
    who = f"rank {', '.join(map(str, slow['ranks']))}" if slow["ranks"] else "every rank"
    tail = {"constant": "", "pareto": " on average with a heavy tail", "host": " as one slow host"}
    return f"{who} slower by {1e3 * slow['seconds']:g} ms a step{tail[slow['kind']]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
