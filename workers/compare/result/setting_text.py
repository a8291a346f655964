"""A setting in words, and what of it a row was spared or had emulated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hubring.workers.compare.result.findings import Entry, Findings


def without_servers(setting: str) -> str:
    """The key of a setting without its number of servers: what a ring sees of it."""
    return re.sub(r"(^| )k\d+(?= |$)", "", setting).strip()


def words(setting: Mapping[str, Any], key: str, servers: bool = True) -> str:
    """A setting as a sentence's part; its key where the results say nothing of it.

    Args:
        setting: As the results have it.
        key: Its own.
        servers: Whether to tell their number.
    """
    if "workers" not in setting:
        return key
    parts = [_count(setting["workers"], "worker")]
    parts += [_count(setting.get("servers", 1), "server")] if servers else []
    told: Mapping[str, Callable[[Any], str]] = {
        "link": _link,
        "straggler": _straggler,
        "fault": _fault,
        "compute": _compute,
    }
    parts += [tell(setting[name]) for name, tell in told.items() if setting.get(name) is not None]
    return ", ".join(parts)


def emulation(entry: Entry, setting: Mapping[str, Any]) -> str | None:
    """In words, what of a row's time was slept instead of computed; None where nothing was."""
    parts = {"compute": "compute", "straggler": "stragglers"}
    slept = [word for name, word in parts.items() if setting.get(name) is not None]
    return f"emulated {' and '.join(slept)}".strip() if entry.emulated else None


def name(entry: Entry, findings: Findings) -> str:
    """A row's name, with what is emulated of it."""
    slept = emulation(entry, findings.setting(entry.setting))
    return f"{entry.row} ({slept})" if slept else entry.row


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _link(link: Mapping[str, Any]) -> str:
    rate, latency, jitter = link.get("rate"), link.get("latency"), link.get("jitter")
    parts = ["links"] + ([] if rate is None else [f"of {_rate(rate)}"])
    parts += [f"with {_ms(latency)} latency"] if latency else []
    parts += [f"± {_ms(jitter)}"] if jitter else []
    return " ".join(parts)


def _rate(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def _straggler(straggler: Mapping[str, Any]) -> str:
    kind = {"pareto": "heavy-tailed", "host": "one slow host,", "constant": "constant"}[straggler["kind"]]
    ranks = straggler.get("ranks") or ()
    who = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}" if ranks else "all ranks"
    return f"stragglers: {kind} {_ms(straggler['seconds'])} a step, {who}"


def _fault(fault: Mapping[str, Any]) -> str:
    return f"worker {fault['rank']} killed before step {fault['step']}"


def _compute(seconds: float) -> str:
    return f"{_ms(seconds)} of emulated compute a step"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:g} ms"
