"""How a row of the comparison is read: which of the model's cases it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.row import OURS, Row
from hubring.workers.compare.experiment.setting import Setting

Rule = Literal["ring", "bsp", "backup", "ssp", "asp"]

RINGS = ("ddp", "ddp-gloo", "mpi", "gloo+sgd", "horovod")
"""Rows of others that are allreduces around a ring."""
HUBS: dict[str, Rule] = {"rpc": "bsp", "ray": "bsp"}
"""Rows of others that have one server over a wire."""


class Reading(Struct, frozen=True, kw_only=True):
    """What the model has to know of a row.

    Attributes:
        name: The row's.
        alone: It has one process.
        rule: Who waits for whom.
        staleness: Of ssp.
        backup: Workers that a round does not wait for.
        steps: The hub steps; else the workers do.
        wire: Which it insists on; empty: the fastest that reaches.
        colocated: Every worker's host has a shard.
    """

    name: str
    alone: bool = False
    rule: Rule = "bsp"
    staleness: int = 0
    backup: int = 0
    steps: bool = True
    wire: str = ""
    colocated: bool = False

    @property
    def on_hub(self) -> bool:
        return not self.alone and self.rule != "ring"

    def wire_in(self, setting: Setting) -> str:
        """What its bytes travel by."""
        if not self.on_hub:
            return "gloo"
        return self.wire or ("shm" if setting.link is None else "zmq")


def read(row: str | Row) -> Reading:
    """What the model makes of a row.

    Raises:
        UsageError: It has no model for it.
    """
    name = row if isinstance(row, str) else row.name
    if name in RINGS:
        return Reading(name=name, rule="ring")
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
        colocated="--colocate" in server,
    )


def _found(name: str) -> Row:
    """A row of the comparison that is no peer's."""
    if name in OURS:
        return OURS[name]
    known = ", ".join((*OURS, *RINGS, *HUBS))
    raise UsageError(f"there is no model of a row {name!r}; there is one of {known}")


def _rule(word: str) -> Rule:
    rules: dict[str, Rule] = {"ring": "ring", "bsp": "bsp", "backup": "backup", "ssp": "ssp", "asp": "asp"}
    if word not in rules:
        raise UsageError(f"there is no model of --mode {word}; there is one of {', '.join(rules)}")
    return rules[word]


def _flags(words: tuple[str, ...]) -> dict[str, str]:
    """Flags with what follows them, empty where that is the next flag."""
    pairs = pairwise((*words, ""))
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}
