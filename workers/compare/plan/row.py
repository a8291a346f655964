"""Rows of the comparison: the ways to train, from which the flags of their programs follow."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.config.declaration import flag_words
from hubring.workers.compare.plan.setting import Fault, Setting
from hubring.workers.peers.rows import PEERS, PeerRow

Rule = Literal["ring", "bsp", "backup", "ssp", "asp"]
"""Which workers wait for each other: those around a ring, or as the hub's mode says."""


class Row(Struct, frozen=True):
    """One way to train.

    Attributes:
        name: Name in `--rows`.
        about: What it does, in one sentence.
        rule: Which workers wait for each other; None: one process, or a peer.
        staleness: Bound of ssp.
        backup: Number of workers that a round does not wait for.
        aggregate: The hub only averages, and every worker steps.
        transport: Transport to the hub; empty: the experiment's.
        backend: Backend of the ring; empty: NCCL if it is the experiment's, else what the ring chooses.
        codec: Codec of the gradients; empty: no compression.
        colocated: Each worker starts a shard on its own host, so that the number of servers has no effect.
        standbys: Standbys of each process of the hub.
        min_workers: Number of workers down to which a ring goes on; None: it ends with its first loss.
        peer: The peer that it runs; None: a row of Hubring.
        local: The workers of a host reduce among themselves first.
        unedited: Whether it only trains scripts with a `torch.distributed` group of their own.
    """

    name: str
    about: str
    rule: Rule | None = None
    staleness: int = 0
    backup: int = 0
    aggregate: bool = False
    transport: str = ""
    backend: str = ""
    codec: str = ""
    colocated: bool = False
    standbys: int = 0
    min_workers: int | None = None
    peer: PeerRow | None = None
    local: bool = False
    unedited: bool = False

    @property
    def server(self) -> tuple[str, ...] | None:
        """Flags for the server; None: no server."""
        if self.rule is None:
            return None
        mode = () if self.rule == "ring" else ("--mode", self.rule)
        values = {"staleness": self.staleness, "backup": self.backup, "standby": self.standbys}
        return (*mode, *_spell(values), *(["--colocate"] if self.colocated else []))

    @property
    def worker(self) -> tuple[str, ...]:
        """Flags for every worker."""
        topology = "ring" if self.rule == "ring" else ""
        values = {"topology": topology, "transport": self.transport, "backend": self.backend}
        values |= {"compress": self.codec}
        words = _spell(values | {"min-workers": self.min_workers})
        set_flags = {"--aggregate": self.aggregate, "--local": self.local, "--as-gloo": self.unedited}
        return (*words, *(name for name, is_set in set_flags.items() if is_set))

    @property
    def on_hub(self) -> bool:
        return self.rule not in (None, "ring")

    @property
    def synchronous(self) -> bool:
        """Whether its workers complete each step together."""
        return self.rule in (None, "ring", "bsp")

    @property
    def exact(self) -> bool:
        """Whether it must produce the same parameters as one process with the whole batch."""
        return self.synchronous and not self.codec

    @property
    def beside_nccl(self) -> str:
        """Why the row does not run if the backend is NCCL; empty if it does."""
        if self.peer is not None:
            return "" if self.peer.grouped else "its library exchanges host memory"
        if self.backend:
            return f"its --backend is {self.backend}"
        return "its --compress needs Gloo" if self.codec and not self.on_hub else ""

    def workers(self, asked: int) -> int:
        """Returns the number of workers of this row where the setting has `asked`."""
        return 1 if self.server is None and self.peer is None else asked

    def hosts(self, setting: Setting) -> tuple[int, int]:
        """Returns how many hosts the row needs: for workers, and for shards with hosts of their own.

        A coordinator, which only rings and colocated hubs have alone, runs on a worker's host.
        """
        served = self.on_hub if self.peer is None else self.peer.served
        shards = setting.servers if served and not self.colocated else 0
        return ceil(self.workers(setting.workers) / setting.sharing), shards * (1 + self.standbys)

    def _has(self, fault: Fault) -> bool:
        """Whether the row has a process that can be the fault's victim."""
        if fault.victim == "worker":
            return self.server is not None or self.peer is not None
        if fault.victim == "standby":
            return self.standbys > 0
        return self.on_hub if fault.victim == "shard" else self.server is not None

    def meets(self, setting: Setting) -> Setting:
        """Returns the part of a setting that affects this row, so that no run is repeated.

        A ring has no shards. A local process has no network and no worker to lose, and only its own host
        can be slow. With emulated compute it computes for all workers. A process that the row does not have
        cannot be killed.
        """
        if setting.fault is not None and not self._has(setting.fault):
            return self.meets(replace(setting, fault=None))
        if self.colocated:
            return replace(setting, servers=1)
        if self.on_hub or (self.peer is not None and self.peer.served and not self.peer.leads):
            return setting
        if self.server is not None or self.peer is not None:
            return replace(setting, servers=1)
        slow = setting.straggler
        return Setting(
            workers=setting.workers,
            straggler=slow if slow is not None and (not slow.ranks or 0 in slow.ranks) else None,
            compute=setting.compute,
        )


def _spell(values: Mapping[str, object]) -> list[str]:
    """Returns the flags of values that are set."""
    return flag_words({name: value for name, value in values.items() if value})


def _named(*rows: Row) -> dict[str, Row]:
    return {row.name: row for row in rows}


ROWS = _named(
    Row("local", "one process trains on the whole batch"),
    Row("ring", "gradients are averaged around a ring; every worker steps", "ring"),
    Row("hub-bsp", "the hub waits for all workers, averages and steps once", "bsp"),
    Row("hub-ssp", "the hub steps on arrival; no worker leads by more than 2 steps", "ssp", staleness=2),
    Row("hub-asp", "the hub steps on arrival; no worker waits", "asp"),
    Row("hub-aggregate", "the hub averages; every worker steps", "bsp", aggregate=True),
)
"""The rows of Hubring that a comparison runs by default."""

WIRED = {
    f"hub-{wire}": Row(f"hub-{wire}", f"hub-bsp over {wire}", "bsp", transport=wire)
    for wire in ("shm", "zmq", "grpc", "zmq-tcp", "grpc-tcp")
}
"""The hub over one transport, whatever the experiment sets: for a comparison of transports."""

VARIED = _named(
    Row("hub-backup", "the hub does not wait for the slowest worker of a step", "backup", backup=1),
    Row("hub-colocated", "hub-bsp with a shard on each worker's host", "bsp", colocated=True),
    Row("hub-local", "hub-bsp; the workers of a host push one sum", "bsp", local=True),
    Row("hub-standby", "hub-bsp with standbys of its processes", "bsp", standbys=1),
    Row("ring-heals", "a ring that goes on without a lost worker", "ring", min_workers=1),
    Row("ring-local", "one worker of each host is in the ring, for all of them", "ring", local=True),
    Row("ring-gloo", "a ring on Gloo, also where all workers are on one host", "ring", backend="gloo"),
)
"""Other ways to run a hub or a ring."""

CODECS = ("bf16", "fp16", "int8", "sign", "topk:0.01", "powersgd:4")

CODED = _named(
    *(
        # PowerSGD's two rounds produce a mean for the workers' own optimizers.
        replace(
            row,
            name=f"{way}-{codec}",
            about=f"{row.name} with gradients sent as {codec}",
            codec=codec,
            aggregate=row.on_hub and codec.startswith("powersgd"),
        )
        for way, row in (("hub", ROWS["hub-bsp"]), ("ring", ROWS["ring"]))
        for codec in CODECS
    )
)
"""The synchronous hub and the ring with each codec of gradients."""

OURS = ROWS | WIRED | VARIED | CODED

UNEDITED = _named(
    Row(
        "ddp-hub",
        "a DistributedDataParallel script as it is; the hub averages for its group",
        "bsp",
        aggregate=True,
        unedited=True,
    )
)
"""The row of scripts that know nothing of Hubring, beside the peer `ddp`."""

EVERY = OURS | UNEDITED | _named(*(Row(peer.name, peer.about, peer=peer) for peer in PEERS.values()))
"""All rows including peers, some of which need their own libraries."""


def meets(name: str, setting: Setting) -> Setting:
    """Returns the part of a setting that affects the row with this name; of an unknown row, all of it."""
    return EVERY[name].meets(setting) if name in EVERY else setting
