"""Rows of the comparison: the ways to train, each as what its programs are told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.choice import chosen
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.peers.rows import PEERS, PeerRow


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train.

    Attributes:
        name: What the user calls it.
        about: What it does, in one sentence.
        server: Flags for the server; None: it needs no server.
        worker: Flags for every worker.
        synchronous: It must end in the same parameters as one process with the whole batch.
        peer: Whose way it is; None: ours.
    """

    name: str
    about: str
    server: tuple[str, ...] | None
    worker: tuple[str, ...] = ()
    synchronous: bool = True
    peer: PeerRow | None = None

    @property
    def on_hub(self) -> bool:
        return self.name.startswith("hub-")

    @property
    def wired(self) -> bool:
        """Whether it has a transport of its own."""
        return "--transport" in self.worker

    def workers(self, asked: int) -> int:
        """How many workers this row starts where the others start `asked`."""
        return 1 if self.server is None and self.peer is None else asked

    def meets(self, setting: Setting) -> Setting:
        """What of a setting makes a difference to this row, so that nothing is run twice.

        A ring has no shards. A process alone has no network, nobody to lose, and only its own host to
        be slow on; where computing is emulated it computes for all.
        """
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
        Row("local", "one process takes the whole batch", server=None),
        Row("ring", "gradients averaged around a Gloo ring, every worker steps", (), ("--topology", "ring")),
        Row("hub-bsp", "the hub waits for all, averages and steps once", ("--mode", "bsp")),
        Row(
            "hub-ssp",
            "the hub steps on arrival; nobody leads by more than 2 steps",
            ("--mode", "ssp", "--staleness", "2"),
            synchronous=False,
        ),
        Row("hub-asp", "the hub steps on arrival; nobody waits", ("--mode", "asp"), synchronous=False),
        Row("hub-aggregate", "the hub averages, every worker steps", ("--mode", "bsp"), ("--aggregate",)),
    )
}

"""Ours, all of which a comparison takes unless it is told otherwise."""

WIRED = {
    f"hub-{wire}": Row(f"hub-{wire}", f"hub-bsp by {wire}", ("--mode", "bsp"), ("--transport", wire))
    for wire in ("shm", "zmq", "grpc")
}
"""The hub by one wire, whatever the experiment's is: for a comparison of wires."""

OURS = ROWS | WIRED

EVERY = OURS | {peer.name: Row(peer.name, peer.about, None, peer=peer) for peer in PEERS.values()}
"""The peers as well, some of which want libraries of their own."""


def select(names: Iterable[str]) -> list[Row]:
    """The rows of these names, in this order.

    Raises:
        UsageError: No row has that name, one is named twice, or none is named.
    """
    rows = chosen(names, EVERY)
    if not rows:
        raise UsageError(f"--rows names no row; there are {', '.join(EVERY)}")
    return rows
