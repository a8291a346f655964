"""Settings: the conditions of a run, the same for every row; as keys such as `n2 k1 1gbit`, and in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from hubring.ps.config.values import Whole
from hubring.ps.core.errors import UsageError
from hubring.workers.runtime.slowdown import Straggler

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)")
_RATES = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def read_rate(value: object) -> float:
    """Returns bits per second from a number, or from text in the spelling of tc, such as `200mbit`.

    Raises:
        UsageError: The value is neither.
    """
    return _read_quantity(value, _RATES, "a rate in bits per second, such as 200mbit, 1gbit or 1000000000")


def read_seconds(value: object) -> float:
    """Returns seconds from a number, or from text with a unit, such as `5ms`.

    Raises:
        UsageError: The value is neither.
    """
    return _read_quantity(value, _TIMES, "a time, such as 5ms, 100us, 2s or 0.005")


def _read_quantity(value: object, units: dict[str, float], allowed: str) -> float:
    match = _NUMBER.fullmatch(str(value).strip().lower())
    if match is None or match[2] not in units or isinstance(value, bool):
        raise UsageError(f"{value!r}: expected {allowed}")
    return float(match[1]) * units[match[2]]


LINE_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full Ethernet frame, and its TCP payload with timestamps."""
BURST_BYTES = 128 << 10
"""Bytes that an emulated link passes at once after a pause, its token bucket: two packets of the largest size
before segmentation."""


class Link(Struct, frozen=True, kw_only=True):
    """The link from a host to the switch.

    Attributes:
        rate: Bits a second, each way; None: unlimited.
        latency: Seconds from host to host.
        jitter: Seconds by which the latency varies, up and down, uniformly.
        sharing: Workers of each host, which share its link.
    """

    rate: float | None = None
    latency: float = 0.0
    jitter: float = 0.0
    sharing: int = 1

    def __post_init__(self) -> None:
        if self.rate is not None and self.rate <= 0:
            raise UsageError(f"link: rate {self.rate:g} bit/s; expected a rate above 0")
        if not 0 <= self.jitter <= self.latency:
            raise UsageError(
                f"link: latency {self.latency:g} s and jitter {self.jitter:g} s;"
                " expected a jitter from 0 to the latency"
            )

    def __str__(self) -> str:
        words = [] if self.rate is None else [f"{self.rate / 1e6:g}mbit"]
        words += [f"{1e3 * self.latency:g}ms"] if self.latency else []
        words += [f"+-{1e3 * self.jitter:g}ms"] if self.jitter else []
        words += [f"x{self.sharing}"] if self.sharing > 1 else []
        return " ".join(words)


Victim = Literal["worker", "shard", "standby", "coordinator"]


class Fault(Struct, frozen=True, kw_only=True):
    """A process that is killed.

    Attributes:
        victim: What it is. A row without such a process is not disturbed.
        rank: Its rank or number; 0 for the coordinator.
        step: It is killed before this step of the victim, or of rank 0 if it takes no steps; counted from 0.
    """

    victim: Victim = "worker"
    rank: Whole = 0
    step: Whole

    @property
    def words(self) -> str:
        """Returns the process in words."""
        return self.victim if self.victim == "coordinator" else f"{self.victim} {self.rank}"

    @property
    def worker(self) -> int | None:
        """The rank of the worker that is lost; None if it is another process."""
        return self.rank if self.victim == "worker" else None

    def __str__(self) -> str:
        victim = "" if self.victim == "worker" else self.victim
        return f"kill{victim}{self.rank}@{self.step}"


class Setting(Struct, frozen=True, kw_only=True):
    """One point of an experiment's grid.

    Attributes:
        key: Name for people, files and JSON, built from all other fields.
        workers: Processes that share the batch; the local row has one.
        servers: Shard processes of the hub; with a link, each has its own host.
        link: Link of each host; None: all processes run on this machine over loopback.
        straggler: Slow workers; None: none.
        fault: The process to kill; None: none.
        compute: Seconds that every worker sleeps in every step to emulate a GPU; None: no emulation.
    """

    key: str = ""
    workers: int
    servers: int = 1
    link: Link | None = None
    straggler: Straggler | None = None
    fault: Fault | None = None
    compute: float | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or self.servers < 1:
            raise UsageError(f"{self.workers} workers, {self.servers} servers; expected at least 1 of each")
        lost = None if self.fault is None else self.fault.worker
        slow = self.straggler.ranks if self.straggler else ()
        for rank in (*slow, *([] if lost is None else [lost])):
            if not 0 <= rank < self.workers:
                raise UsageError(
                    f"rank {rank} of {self.workers} workers; expected a rank from 0 to {self.workers - 1}"
                )
        if self.fault is not None and lost is None and self.fault.rank >= self.servers:
            raise UsageError(
                f"{self.fault.words} of {self.servers} servers; expected a number from 0 to"
                f" {self.servers - 1}"
            )
        words = [f"n{self.workers}", f"k{self.servers}"]
        words += [str(each) for each in (self.link, self.straggler, self.fault) if each is not None]
        words += [] if self.compute is None else [f"compute{1e3 * self.compute:g}ms"]
        force_setattr(self, "key", " ".join(words))

    @property
    def sharing(self) -> int:
        """Workers that share a host and its link; 1 without links."""
        return min(self.link.sharing, self.workers) if self.link else 1

    @property
    def emulated(self) -> bool:
        """Whether workers sleep for part of a step."""
        return self.compute is not None or self.straggler is not None

    def compute_of(self, processes: int) -> float | None:
        """Returns the seconds that each process sleeps in a step: a single process computes for all."""
        if self.compute is None:
            return None
        return self.compute * (self.workers if processes == 1 else 1)


def grouped(settings: Iterable[Setting], axis: str) -> list[list[Setting]]:
    """Returns settings that differ only in one field, in ascending order of it."""
    groups: dict[tuple[object, ...], list[Setting]] = {}
    rest = attrgetter(*(name for name in Setting.__struct_fields__ if name not in (axis, "key")))
    for setting in settings:
        groups.setdefault(rest(setting), []).append(setting)
    return [sorted(group, key=attrgetter(axis)) for group in groups.values()]


def without_servers(setting: str) -> str:
    """Returns the key of a setting without its number of servers, which a ring does not use."""
    return re.sub(r"(^| )k\d+(?= |$)", "", setting).strip()


def words(setting: Setting, *, servers: bool = True) -> str:
    """Returns a setting as a heading; `servers`: with their number."""
    return ", ".join(setting_words(setting, servers=servers))


def setting_words(setting: Setting, *, servers: bool = True) -> list[str]:
    """Returns the parts of a setting in words."""
    parts = [_count(setting.workers, "worker")]
    parts += [_count(setting.servers, "server")] if servers else []
    if link := setting.link:
        jitter = f" ± {_ms(link.jitter)}" if link.jitter else ""
        parts += [f"{link.sharing} workers on each host"] if link.sharing > 1 else []
        parts += [f"links of {_rate(link.rate)}"] if link.rate else []
        parts += [f"{_ms(link.latency)} of latency{jitter}"] if link.latency else []
    parts += [straggler(setting.straggler)] if setting.straggler else []
    if fault := setting.fault:
        parts.append(f"{fault.words} killed before step {fault.step}")
    parts += [] if setting.compute is None else [f"{_ms(setting.compute)} of emulated compute per step"]
    return parts


def legend(settings: Iterable[Setting]) -> str:
    """Returns what the keys of settings mean, as `n2 k1: 2 workers, 1 server; ...`."""
    found = {each.key: words(each) for each in settings}
    return "; ".join(f"{key}: {text}" for key, text in found.items())


def listed(words: Sequence[str], last: str = "and") -> str:
    """Returns words joined as in a sentence."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:g} ms"


def straggler(slow: Straggler) -> str:
    """Returns a straggler in words."""
    where = f"rank {', '.join(map(str, slow.ranks))}" if slow.ranks else "every rank"
    kind = {"constant": "a", "pareto": "a heavy-tailed mean", "host": "a slow host's mean"}
    return f"{kind[slow.kind]} delay of {_ms(slow.seconds)} per step on {where}"
