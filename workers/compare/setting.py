"""Settings: under which circumstances a row is run, the same for every row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from hubring.ps.core.errors import UsageError

Kind = Literal["constant", "pareto", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins a host to the switch.

    Attributes:
        rate: Bits a second, each way; None: as fast as the machine goes.
        latency: Seconds that a byte needs from host to host.
        jitter: Seconds by which that varies, up and down, evenly.
    """

    rate: float | None = None
    latency: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.rate is not None and self.rate <= 0:
            raise UsageError(f"link: a rate of {self.rate:g} bit/s moves nothing; give one above 0")
        if not 0 <= self.jitter <= self.latency:
            raise UsageError(
                f"link: latency {self.latency:g} s and jitter {self.jitter:g} s;"
                " jitter goes from 0 to the latency"
            )

    def __str__(self) -> str:
        words = [] if self.rate is None else [f"{self.rate / 1e6:g}mbit"]
        words += [f"{1e3 * self.latency:g}ms"] if self.latency else []
        words += [f"+-{1e3 * self.jitter:g}ms"] if self.jitter else []
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Who is slow, and how.

    Attributes:
        kind: `constant`: the same every step; `pareto`: mostly little, seldom much; `host`: the
            ranks are one host, slow in the same steps.
        seconds: What a step takes longer, on average.
        ranks: Who; empty: all.
        shape: Of the Pareto distribution, above 1; the smaller, the heavier its tail.
    """

    kind: Kind
    seconds: float
    ranks: tuple[int, ...] = ()
    shape: float = 2.5

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(Kind)):
            raise UsageError(f"straggler: kind {self.kind!r}; there are {', '.join(kinds)}")
        if self.seconds < 0 or self.shape <= 1:
            raise UsageError(
                f"straggler: {self.seconds:g} s with shape {self.shape:g};"
                " seconds are at least 0, and the shape is above 1, or there is no mean"
            )

    def __str__(self) -> str:
        who = "" if not self.ranks else "@" + ",".join(map(str, self.ranks))
        return f"{self.kind}{1e3 * self.seconds:g}ms{who}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A worker that is killed.

    Attributes:
        rank: Which.
        step: Before which of its steps, counted from 0.
    """

    rank: int
    step: int

    def __str__(self) -> str:
        return f"kill{self.rank}@{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of an experiment's grid.

    Attributes:
        workers: Processes that share the batch; the local row has one.
        servers: Shard processes of the hub; hosts of their own where there is a link.
        link: What joins the hosts; None: all run on this machine, and its loopback is the wire.
        straggler: Who is slow; None: whom the machine makes slow.
        fault: Who is killed; None: nobody.
        compute: Seconds that every worker sleeps in every step, as a GPU would compute; None: it does not.
    """

    workers: int
    servers: int = 1
    link: Link | None = None
    straggler: Straggler | None = None
    fault: Fault | None = None
    compute: float | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or self.servers < 1:
            raise UsageError(f"{self.workers} workers, {self.servers} servers; there is one of each at least")
        for rank in (*self._ranks, *([self.fault.rank] if self.fault else [])):
            if not 0 <= rank < self.workers:
                raise UsageError(
                    f"rank {rank} of {self.workers} workers; ranks go from 0 to {self.workers - 1}"
                )

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self.straggler.ranks if self.straggler else ()

    @property
    def emulated(self) -> bool:
        """Whether time is spent that nothing was computed in."""
        return self.compute is not None or self.straggler is not None

    def compute_of(self, processes: int) -> float | None:
        """Seconds that each of so many sleeps in a step: one alone computes what the others share."""
        if self.compute is None:
            return None
        return self.compute * (self.workers if processes == 1 else 1)

    @property
    def key(self) -> str:
        """What tells it from the others: a name for people, files and JSON."""
        words = [f"n{self.workers}", f"k{self.servers}"]
        words += [str(each) for each in (self.link, self.straggler, self.fault) if each is not None]
        words += [] if self.compute is None else [f"compute{1e3 * self.compute:g}ms"]
        return " ".join(words)

    def as_json(self) -> dict[str, Any]:
        """The setting as a JSON object; `from_json` reads it."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Setting:
        """The setting that `as_json` wrote.

        Raises:
            UsageError: A value is not allowed.
            TypeError: A key is unknown or missing.
        """
        parts = {"link": Link, "straggler": Straggler, "fault": Fault}
        made: dict[str, Any] = {**values}
        for name, kind in parts.items():
            if values.get(name) is not None:
                made[name] = kind(**{key: _frozen(value) for key, value in values[name].items()})
        return Setting(**made)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
