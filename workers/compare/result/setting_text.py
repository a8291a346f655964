"""A setting in words, for headings and for sentences, and what of a row was emulated in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hubring.workers.compare.experiment.setting import Fault, Link, Setting
from hubring.workers.compare.result.findings import Entry, Findings, Number
from hubring.workers.compare.result.ratio import Ratio, ratio
from hubring.workers.slowdown.straggler import Straggler


def without_servers(setting: str) -> str:
    """The key of a setting without its number of servers: what a ring sees of it."""
    return re.sub(r"(^| )k\d+(?= |$)", "", setting).strip()


def words(setting: Setting, key: str, servers: bool = True) -> str:
    """A setting as a heading has it.

    Args:
        setting: Which.
        key: Its own, or without servers.
        servers: Whether to tell their number.
    """
    parts = [_count(setting.workers, "worker")]
    parts += [_count(setting.servers, "server")] if servers else []
    parts += [] if setting.link is None else [_link(setting.link)]
    parts += [] if setting.straggler is None else [_straggler(setting.straggler)]
    parts += [] if setting.fault is None else [_fault(setting.fault)]
    parts += [] if setting.compute is None else [f"{_ms(setting.compute)} of emulated compute a step"]
    return ", ".join(parts)


def emulation(entry: Entry, setting: Setting) -> str | None:
    """In words, what of a row's time was slept instead of computed; None where nothing was."""
    parts = {"compute": setting.compute, "stragglers": setting.straggler}
    slept = [word for word, value in parts.items() if value is not None]
    return f"emulated {' and '.join(slept)}".strip() if entry.emulated else None


def name(entry: Entry, findings: Findings) -> str:
    """A row's name, with what is emulated of it."""
    slept = emulation(entry, findings.setting(entry.setting))
    return f"{entry.row} ({slept})" if slept else entry.row


def listed(words: Sequence[str], last: str = "and") -> str:
    """Words as a sentence lists them."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _link(link: Link) -> str:
    parts = ["links"] + ([] if link.rate is None else [f"of {_rate(link.rate)}"])
    parts += [f"with {_ms(link.latency)} latency"] if link.latency else []
    parts += [f"± {_ms(link.jitter)}"] if link.jitter else []
    return " ".join(parts)


def _rate(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def _straggler(slow: Straggler) -> str:
    kind = {"pareto": "heavy-tailed", "host": "one slow host,", "constant": "constant"}[slow.kind]
    ranks = ", ".join(map(str, slow.ranks))
    who = f"rank{'' if len(slow.ranks) == 1 else 's'} {ranks}" if ranks else "all ranks"
    return f"stragglers: {kind} {_ms(slow.seconds)} a step, {who}"


def _fault(fault: Fault) -> str:
    return f"worker {fault.rank} killed before step {fault.step}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:g} ms"


# For the sentences of the verdict.


@dataclass(frozen=True, slots=True)
class Scope:
    """One setting with its rows.

    Attributes:
        findings: What it is part of.
        setting: Which.
        words: What tells it from the other settings; None where there is no other.
    """

    findings: Findings
    setting: Setting
    words: Sequence[str] | None

    @property
    def rows(self) -> list[Entry]:
        """Its rows, in order."""
        return self.findings.under(self.setting.key)

    @property
    def names(self) -> list[str]:
        """The rows' names."""
        return [row.row for row in self.rows]

    def number(self, row: str, name: str) -> Number | None:
        """A row's number; None if it has none, or there is no such row."""
        return next((each.number(name) for each in self.rows if each.row == row), None)

    def ratio(self, name: str, first: str, second: str) -> Ratio | None:
        """A number of one row by that of another; None if one has none."""
        one, other = self.number(first, name), self.number(second, name)
        return None if one is None or other is None else ratio(one.values, other.values)

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


def scopes(findings: Findings) -> list[Scope]:
    """All settings with their rows."""
    settings = findings.settings
    shared = set.intersection(*(set(_words(setting)) for setting in settings))
    return [
        Scope(
            findings,
            setting,
            [word for word in _words(setting) if word not in shared] if len(settings) > 1 else None,
        )
        for setting in settings
    ]


def _words(setting: Setting) -> list[str]:
    words = [_count(setting.workers, "worker"), _count(setting.servers, "server")]
    if link := setting.link:
        words += [f"links of {link.rate / 1e6:g} Mbit/s"] if link.rate else []
        words += [f"{_ms(link.latency)} of latency"] if link.latency else []
    words += [straggler(setting.straggler)] if setting.straggler else []
    if fault := setting.fault:
        words.append(f"worker {fault.rank} killed at step {fault.step}")
    words += [] if setting.compute is None else [f"{_ms(setting.compute)} of computing emulated"]
    return words


def straggler(slow: Straggler) -> str:
    """A straggler in words."""
    who = f"rank {', '.join(map(str, slow.ranks))}" if slow.ranks else "every rank"
    tail = {"constant": "", "pareto": " on average with a heavy tail", "host": " as one slow host"}
    return f"{who} slower by {_ms(slow.seconds)} a step{tail[slow.kind]}"
