"""A cluster as nccl-tests measured it, and the two levels of its network that follow from that."""

from __future__ import annotations

from math import ceil, log2

from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.cluster.curve import Curve, fitted, measured

NCCL, RING = "nccl", "ring"


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published or measured sweep over sizes.

    Attributes:
        nodes: Number of nodes.
        gpus: GPUs on each node.
        rows: Bytes and microseconds of an allreduce, out of place, by rising size.
        algorithm: `ring` if NCCL was told to use it; `nccl`: NCCL chose.
        source: Where it was published, as a URL; empty: measured by the user.
        about: Hardware and options.
    """

    nodes: int
    gpus: int
    rows: list[tuple[int, float]]
    algorithm: str = NCCL
    source: str = ""
    about: str = ""

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def seconds(self) -> list[tuple[int, float]]:
        """Bytes and seconds."""
        return [(size, micro / 1e6) for size, micro in self.rows]


class Level(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network inside of a node, or between nodes.

    Attributes:
        rate: Bytes per second each way: of a GPU inside, of a node between.
        alpha: Seconds of one hop of a small message.
        fill: Seconds per square root of a byte, in which a pipeline of chunks fills. It does not grow with
            the number of nodes: eight nodes of H100 took no longer to fill than four.
        source: Where the rate was published, as a URL.
        about: Hardware, and where the other figures are from.
    """

    rate: float
    alpha: float = 0.0
    fill: float = 0.0
    source: str = ""
    about: str = ""


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of several GPUs.

    Attributes:
        name: Name for people.
        gpus: GPUs of a node.
        tables: Measured sweeps.
        ring_rate: Bytes per second of a ring inside a node; None: that of the sweep of one node. A switch
            that sums (NVLink SHARP) is faster than a ring.
        between: Between nodes; None: follows from the sweeps of several nodes.
        inside: Inside a node; None: follows from the sweeps of one node.
    """

    name: str
    gpus: int
    tables: list[Table] = []
    ring_rate: float | None = None
    inside: Level | None = None
    between: Level | None = None

    def measured(self, nodes: int, gpus: int, nbytes: float) -> float | None:
        """Returns the seconds that NCCL took for this size, from a sweep of as many nodes and GPUs."""
        for table in self.tables:
            if (table.nodes, table.gpus, table.algorithm) == (nodes, gpus, NCCL):
                return measured(table.seconds, nbytes)
        return None

    @property
    def swept(self) -> list[tuple[int, int]]:
        """Nodes, and GPUs of each, of the sweeps in which NCCL chose, by rising number."""
        return sorted({(table.nodes, table.gpus) for table in self.tables if table.algorithm == NCCL})

    @property
    def sources(self) -> list[str]:
        """Where the sweeps and levels were published."""
        named = [table.source for table in self.tables]
        named += [level.source for level in (self.inside, self.between) if level is not None]
        return list(dict.fromkeys(filter(None, named)))

    def covers(self, nodes: int, gpus: int, nbytes: float) -> bool:
        """Whether sweeps of at least as many nodes, with as many GPUs on each, have this size."""
        return any(
            table.nodes >= nodes
            and table.gpus == gpus
            and (table.nodes > 1) == (nodes > 1)
            and table.rows[0][0] <= nbytes <= table.rows[-1][0]
            for table in self.tables
        )

    def within(self) -> Level:
        """Returns the level inside a node.

        Raises:
            UsageError: No sweep of one node was measured.
        """
        if self.inside is not None:
            return self.inside
        table = max((each for each in self.tables if each.nodes == 1), key=_reach, default=None)
        if table is None or table.gpus < 2:
            raise UsageError(
                f"calibration {self.name} has no sweep of one node with several GPUs; add `--intra`, or the"
                " output of all_reduce_perf on one node to the file"
            )
        curve, hops = fitted(table.seconds), 2 * (table.gpus - 1)
        return Level(
            rate=curve.rate * hops / table.gpus,
            alpha=curve.alpha / hops,
            fill=curve.fill,
        )

    def among(self) -> Level:
        """Returns the level between nodes.

        With two nodes a tree moves half of what it moves with more nodes, so sweeps of more nodes come first.

        Raises:
            UsageError: No sweep of several nodes was measured.
        """
        if self.between is not None:
            return self.between
        tables = [each for each in self.tables if each.nodes > 1]
        several = [each for each in tables if each.nodes > 2 or each.algorithm == RING] or tables
        if not several:
            raise UsageError(
                f"calibration {self.name} has no sweep of several nodes; add `--rate` with the rate of a"
                " node's links, or the output of all_reduce_perf on several nodes to the file"
            )
        # The largest size of the most nodes decides; the smallest sizes show the latency.
        largest = max(several, key=lambda table: (table.nodes > 2, table.nodes, _reach(table)))
        curve = fitted(largest.seconds)
        rate = curve.rate * 2 * (largest.ranks - 1) / largest.ranks
        detailed = min((table for table in several if table.nodes > 2), key=_first, default=largest)
        curve, inner = fitted(detailed.seconds), self._inner(detailed.gpus)
        return Level(
            rate=rate,
            # What a sweep takes longer than a node alone, for each hop of a tree.
            alpha=max(0.0, curve.alpha - inner.alpha) / (2 * depth(detailed.nodes)),
            fill=max(0.0, curve.fill - inner.fill),
        )

    def _inner(self, gpus: int) -> Curve:
        level = self.within()
        hops = 2 * (gpus - 1)
        return Curve(alpha=level.alpha * hops, fill=level.fill, rate=level.rate)


def depth(nodes: int) -> int:
    """Returns the hops from the root of a binary tree of nodes to its leaves."""
    return ceil(log2(nodes)) if nodes > 1 else 0


def _reach(table: Table) -> int:
    return table.rows[-1][0]


def _first(table: Table) -> int:
    return table.rows[0][0]
