"""A setting in words, for headings and sentences, and what a row emulates in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hubring.workers.compare.experiment.row import meets
from hubring.workers.compare.experiment.setting import Fault, Link, Setting
from hubring.workers.compare.result.comparisons import Comparisons
from hubring.workers.compare.result.findings import Entry, Findings, Number
from hubring.workers.compare.result.ratio import Ratio
from hubring.workers.slowdown.straggler import Straggler


def without_servers(setting: str) -> str:
    """Returns the key of a setting without its number of servers, which a ring does not use."""
    return re.sub(r"(^| )k\d+(?= |$)", "", setting).strip()


def with_servers(least: float | None) -> str:
    """Returns from how many servers on something holds, in words; None: for no number."""
    return "with no number of servers" if least is None else f"with {least:g} or more servers"


def not_decided(servers: Sequence[int]) -> str:
    """Returns that something is not decided with these numbers of servers, as the end of a clause."""
    return f"not decided with {listed(list(map(str, servers)))} server{'' if list(servers) == [1] else 's'}"


def words(setting: Setting, key: str, servers: bool = True) -> str:
    """Returns a setting as a heading.

    Args:
        setting: The setting.
        key: Its key, with or without servers.
        servers: Whether to include their number.
    """
    parts = [_count(setting.workers, "worker")]
    parts += [_count(setting.servers, "server")] if servers else []
    parts += [] if setting.link is None else [_link(setting.link)]
    parts += [] if setting.straggler is None else [_straggler(setting.straggler)]
    parts += [] if setting.fault is None else [_fault(setting.fault)]
    parts += [] if setting.compute is None else [f"{_ms(setting.compute)} of emulated compute per step"]
    return ", ".join(parts)


def legend(settings: Iterable[Setting]) -> str:
    """Returns what the keys of settings mean, as `n2 k1: 2 workers, 1 server; ...`."""
    found = {each.key: words(each, each.key) for each in settings}
    return "; ".join(f"{key}: {text}" for key, text in found.items())


def emulation(entry: Entry, setting: Setting) -> str | None:
    """Returns which part of a row's time was slept instead of computed, in words; None if none was."""
    met = meets(entry.row, setting)
    parts = {"compute": met.compute, "stragglers": met.straggler}
    slept = [word for word, value in parts.items() if value is not None]
    return f"emulated {' and '.join(slept)}".strip() if entry.emulated else None


def name(entry: Entry, findings: Findings) -> str:
    """Returns a row's name with what it emulates."""
    slept = emulation(entry, findings.setting(entry.setting))
    return f"{entry.row} ({slept})" if slept else entry.row


def listed(words: Sequence[str], last: str = "and") -> str:
    """Returns words joined as in a sentence."""
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
    return f"stragglers: {kind} {_ms(slow.seconds)} per step, {who}"


def _fault(fault: Fault) -> str:
    return f"{fault.words} killed before step {fault.step}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:g} ms"


# For the sentences of the verdict.


@dataclass(frozen=True, slots=True)
class Scope:
    """One setting with its rows.

    Attributes:
        compared: The comparisons of the report.
        setting: The setting.
        words: What differs from the other settings; None if there is no other setting.
    """

    compared: Comparisons
    setting: Setting
    words: Sequence[str] | None

    @property
    def findings(self) -> Findings:
        """The findings."""
        return self.compared.findings

    @property
    def rows(self) -> list[Entry]:
        """The rows of the setting, in order."""
        return self.findings.under(self.setting.key)

    @property
    def names(self) -> list[str]:
        """Names of the rows."""
        return [row.row for row in self.rows]

    def number(self, row: str, name: str) -> Number | None:
        """Returns a number of a row; None if the row or the number does not exist."""
        found = self.row(row)
        return None if found is None else found.number(name)

    def row(self, name: str) -> Entry | None:
        """Returns the row with that name; None if there is none."""
        return next((each for each in self.rows if each.row == name), None)

    def ratio(self, name: str, first: str, second: str) -> Ratio | None:
        """Returns a number of one row divided by that of another; None if one has no value."""
        one, other = self.row(first), self.row(second)
        return None if one is None or other is None else self.compared.ratio(name, one, other)

    def say(self, sentence: str, besides: str = "") -> str:
        """Returns the sentence with the setting in front.

        Args:
            sentence: Begins in lower case.
            besides: A word of the setting that the sentence itself contains.
        """
        where = None if self.words is None else [word for word in self.words if word != besides]
        if where:
            return f"With {', '.join(where)}: {sentence}"
        if where is not None and not besides:
            return f"In the base setting: {sentence}"
        if sentence.split()[0].strip(",") in self.names:  # the name of a row is not capitalized
            return sentence
        return f"{sentence[0].upper()}{sentence[1:]}"


def scopes(compared: Comparisons) -> list[Scope]:
    """Returns all settings with their rows."""
    settings = compared.findings.settings
    shared = set.intersection(*(set(_words(setting)) for setting in settings))
    return [
        Scope(
            compared,
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
        words.append(f"{fault.words} killed at step {fault.step}")
    words += [] if setting.compute is None else [f"{_ms(setting.compute)} of emulated compute"]
    return words


def straggler(slow: Straggler) -> str:
    """Returns a straggler in words."""
    where = f"rank {', '.join(map(str, slow.ranks))}" if slow.ranks else "every rank"
    kind = {"constant": "a", "pareto": "a heavy-tailed mean", "host": "a slow host's mean"}
    return f"{kind[slow.kind]} delay of {_ms(slow.seconds)} per step on {where}"
