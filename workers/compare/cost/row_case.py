"""Maps a row of the comparison to a case of the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from hubring.ps.core import codecs
from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.cluster.allreduce import Algorithm
from hubring.workers.compare.cost.model.formulas import Shards
from hubring.workers.compare.experiment.row import OURS, Row
from hubring.workers.compare.experiment.setting import Setting

Rule = Literal["ring", "bsp", "backup", "ssp", "asp"]

RINGS = ("ddp", "ddp-gloo", "mpi", "gloo+sgd", "horovod")
"""Rows of peers that are allreduces around a ring."""
SHARDED: dict[str, Shards] = {
    # Gathered for forward and for backward, and Gloo's reduce-scatter, which is an allreduce. Each call
    # blocks, and torch copies into and out of its messages.
    "fsdp2": Shards(passes=4, gathers=2, copies=5, overlaps=False),
    # DDP's allreduce, then a broadcast of the parameters that each worker stepped.
    "zero1": Shards(broadcast=True),
}
"""Rows of peers that divide the optimizer's step."""
NCCL: dict[str, Algorithm] = {
    "nccl": "nccl",
    "nccl-ring": "ring",
    "nccl-tree": "tree",
    "nccl-two-level": "two-level",
}
"""Rows of allreduces between GPUs. `run` does not have them: they are only predicted."""
GLOO = ("ring", "ddp", *SHARDED)
"""Rows that can also be on NCCL, and are predicted on Gloo."""
HUBS: dict[str, Rule] = {"rpc": "bsp", "ray": "bsp"}
"""Rows of peers that have one server over a wire."""


_SHARES = {"bf16": 1 / 2, "fp16": 1 / 2, "int8": 1 / 4, "sign": 1 / 32, "topk": 2.0}
"""Bytes by codec, as a share of float32; for topk, of its fraction: each element comes with its index."""


class Reading(Struct, frozen=True, kw_only=True):
    """What the model needs to know about a row.

    Attributes:
        name: Name of the row.
        alone: It has one process.
        rule: Which workers wait for each other.
        staleness: Bound of ssp.
        backup: Number of workers that a round does not wait for.
        steps: The hub steps; else the workers step.
        wire: Wire that the row sets; empty: the fastest that is available.
        colocated: Every worker's host has a shard.
        collective: NCCL's algorithm; None: not a row of NCCL.
        traffic: Bytes that it sends and receives, as a share of those without compression.
        shards: How it divides the step; None: each worker steps all parameters.
    """

    name: str
    alone: bool = False
    rule: Rule = "bsp"
    staleness: int = 0
    backup: int = 0
    steps: bool = True
    wire: str = ""
    colocated: bool = False
    collective: Algorithm | None = None
    traffic: float = 1.0
    shards: Shards | None = None

    @property
    def on_hub(self) -> bool:
        return not self.alone and self.rule != "ring"

    @property
    def together(self) -> bool:
        """Whether its workers exchange at the same time over shared links; a ring's links are its own."""
        return self.on_hub and self.rule in ("bsp", "backup")

    def wire_in(self, setting: Setting) -> str:
        """Returns the wire of its gradients."""
        if not self.on_hub:
            return "gloo"
        return self.wire or ("shm" if setting.link is None else "zmq")


def read(row: str | Row) -> Reading:
    """Returns a row in the model's terms.

    Raises:
        UsageError: There is no model of the row.
    """
    name = row if isinstance(row, str) else row.name
    if name in RINGS:
        return Reading(name=name, rule="ring")
    if name in SHARDED:
        return Reading(name=name, rule="ring", shards=SHARDED[name])
    if name in NCCL:
        return Reading(name=name, rule="ring", collective=NCCL[name])
    if name in HUBS:
        return Reading(name=name, rule=HUBS[name], wire="zmq")
    if isinstance(row, str):
        return read(_found(row))
    if row.server is None:
        return Reading(name=name, alone=True)
    server, worker = _flags(row.server), _flags(row.worker)
    return Reading(
        name=name,
        rule=_rule("ring" if worker.get("--topology") == "ring" else server.get("--mode", "bsp")),
        staleness=int(server.get("--staleness", 0)),
        backup=int(server.get("--backup", 0)),
        steps="--aggregate" not in worker,
        wire=worker.get("--transport", ""),
        colocated=row.colocated,
        traffic=_traffic(worker),
    )


def _traffic(worker: Mapping[str, str]) -> float:
    """Returns the share of bytes that the codec of a worker's flags leaves.

    Raises:
        UsageError: The share depends on the shapes of the model.
    """
    codec = worker.get("--compress")
    if codec is None:
        return 1.0
    kind, argument = codecs.parse(codec)
    if kind not in _SHARES:
        raise UsageError(f"no model of --compress {codec}, whose size depends on the shapes of the model")
    share = _SHARES[kind] * (argument or 1.0)
    # The mean returns in the codec too, except from a hub that steps: it returns whole parameters.
    return share if "--topology" in worker or "--aggregate" in worker else (1 + share) / 2


def _found(name: str) -> Row:
    """Returns a row of Hubring by its name."""
    if name in OURS:
        return OURS[name]
    known = ", ".join((*OURS, *RINGS, *SHARDED, *NCCL, *HUBS))
    raise UsageError(f"no model of row {name!r}; expected one of {known}")


def _rule(word: str) -> Rule:
    rules: dict[str, Rule] = {"ring": "ring", "bsp": "bsp", "backup": "backup", "ssp": "ssp", "asp": "asp"}
    if word not in rules:
        raise UsageError(f"no model of --mode {word}; expected one of {', '.join(rules)}")
    return rules[word]


def _flags(words: tuple[str, ...]) -> dict[str, str]:
    """Returns flags with their values, empty for flags without a value."""
    pairs = pairwise((*words, ""))
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}
