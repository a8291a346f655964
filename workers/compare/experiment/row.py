"""Rows of the comparison: the ways to train, each with the flags of its programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.choice import chosen
from hubring.workers.compare.experiment.setting import Fault, Setting
from hubring.workers.peers.rows import PEERS, PeerRow


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train.

    Attributes:
        name: Name in `--rows`.
        about: What it does, in one sentence.
        server: Flags for the server; None: no server.
        worker: Flags for every worker.
        synchronous: Its workers complete each step together.
        exact: It must produce the same parameters as one process with the whole batch.
        peer: The peer that it runs; None: a row of Hubring.
    """

    name: str
    about: str
    server: tuple[str, ...] | None
    worker: tuple[str, ...] = ()
    synchronous: bool = True
    exact: bool = True
    peer: PeerRow | None = None

    @property
    def colocated(self) -> bool:
        """Whether each worker starts a shard on its own host, so that the number of servers has no effect."""
        return self.server is not None and "--colocate" in self.server

    @property
    def on_hub(self) -> bool:
        return self.name.startswith("hub-")

    @property
    def wired(self) -> bool:
        """Whether it sets its own transport."""
        return "--transport" in self.worker

    @property
    def beside_nccl(self) -> str:
        """Why the row does not run if the backend is NCCL; empty if it does."""
        if self.peer is not None:
            return "" if self.peer.grouped else "its library exchanges host memory"
        if "--topology" not in self.worker:
            return ""
        return "its --compress needs Gloo" if "--compress" in self.worker else ""

    def workers(self, asked: int) -> int:
        """Returns the number of workers of this row where the setting has `asked`."""
        return 1 if self.server is None and self.peer is None else asked

    def hosts(self, setting: Setting) -> tuple[int, int]:
        """Returns how many hosts the row needs: for workers, and for shards with hosts of their own.

        A coordinator, which only rings and colocated hubs have alone, runs on a worker's host.
        """
        served = self.on_hub if self.peer is None else self.peer.served
        shards = setting.servers if served and not self.colocated else 0
        return self.workers(setting.workers), shards * (2 if self.has_standbys else 1)

    @property
    def has_standbys(self) -> bool:
        """Whether its server has a standby for each shard."""
        return self.server is not None and "--standby" in self.server

    def _has(self, fault: Fault) -> bool:
        """Whether the row has a process that can be the fault's victim."""
        if fault.victim == "worker":
            return self.server is not None or self.peer is not None
        if fault.victim == "standby":
            return self.has_standbys
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


ROWS = {
    row.name: row
    for row in (
        Row("local", "one process trains on the whole batch", server=None),
        Row("ring", "gradients are averaged around a ring; every worker steps", (), ("--topology", "ring")),
        Row("hub-bsp", "the hub waits for all workers, averages and steps once", ("--mode", "bsp")),
        Row(
            "hub-ssp",
            "the hub steps on arrival; no worker leads by more than 2 steps",
            ("--mode", "ssp", "--staleness", "2"),
            synchronous=False,
            exact=False,
        ),
        Row(
            "hub-asp",
            "the hub steps on arrival; no worker waits",
            ("--mode", "asp"),
            synchronous=False,
            exact=False,
        ),
        Row("hub-aggregate", "the hub averages; every worker steps", ("--mode", "bsp"), ("--aggregate",)),
    )
}

"""The rows of Hubring that a comparison runs by default."""

WIRED = {
    f"hub-{wire}": Row(f"hub-{wire}", f"hub-bsp over {wire}", ("--mode", "bsp"), ("--transport", wire))
    for wire in ("shm", "zmq", "grpc")
}
"""The hub over one transport, whatever the experiment sets: for a comparison of transports."""

VARIED = {
    row.name: row
    for row in (
        Row(
            "hub-backup",
            "the hub does not wait for the slowest worker of a step",
            ("--mode", "backup", "--backup", "1"),
            synchronous=False,
            exact=False,
        ),
        Row("hub-colocated", "hub-bsp with a shard on each worker's host", ("--mode", "bsp", "--colocate")),
        Row("hub-standby", "hub-bsp with standbys of its processes", ("--mode", "bsp", "--standby", "1")),
        Row(
            "ring-heals",
            "a ring that goes on without a lost worker",
            (),
            ("--topology", "ring", "--min-workers", "1"),
        ),
    )
}
"""Other ways to run a hub or a ring."""

CODECS = ("bf16", "fp16", "int8", "sign", "topk:0.01", "powersgd:4")


def _coded(way: str, codec: str) -> Row:
    """Returns the ring, or the synchronous hub, with compressed gradients."""
    worker = ["--compress", codec]
    if way == "ring":
        worker += ["--topology", "ring"]
    elif codec.startswith("powersgd"):  # its two rounds produce a mean for the workers' own optimizers
        worker += ["--aggregate"]
    about = f"{'ring' if way == 'ring' else 'hub-bsp'} with gradients sent as {codec}"
    return Row(f"{way}-{codec}", about, ("--mode", "bsp") if way == "hub" else (), tuple(worker), exact=False)


CODED = {row.name: row for way in ("hub", "ring") for row in (_coded(way, codec) for codec in CODECS)}
"""The synchronous hub and the ring with each codec of gradients."""

OURS = ROWS | WIRED | VARIED | CODED

EVERY = OURS | {peer.name: Row(peer.name, peer.about, None, peer=peer) for peer in PEERS.values()}
"""All rows including peers, some of which need their own libraries."""


def meets(name: str, setting: Setting) -> Setting:
    """Returns the part of a setting that affects the row with this name; of an unknown row, all of it."""
    return EVERY[name].meets(setting) if name in EVERY else setting


def select(names: Iterable[str]) -> list[Row]:
    """Returns the rows with these names, in this order.

    Raises:
        UsageError: No row has that name, a name occurs twice, or there is no name.
    """
    rows = chosen(names, EVERY)
    if not rows:
        raise UsageError(f"--rows is empty; expected some of {', '.join(EVERY)}")
    return rows
