"""A process's rank and rendezvous in a peer's group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hubring.ps.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process's rank and rendezvous in a peer's group.

    Attributes:
        rank: This worker's rank.
        size: Number of workers.
        meet: The rendezvous of all processes: `HOST:PORT`, or a file that all of them can access.
        host: This worker's address; it uses only the interface with this address, except for NCCL. None: no
            restriction.
        servers: Number of the peer's server processes.
        backend: Backend of a process group: `gloo` or `nccl`.
        timeout: Seconds within which one exchange must finish.
        aggregate: Whether a server only averages, because the script needs the mean.

    Raises:
        UsageError: The rank or the backend is invalid.
    """

    rank: int
    size: int
    meet: str
    host: str | None = None
    servers: int = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout: float = 300.0
    aggregate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(
                f"--rank {self.rank} of --world-size {self.size}: expected a rank from 0 to {self.size - 1}"
            )
        if self.backend not in ("gloo", "nccl"):
            raise UsageError(f"--backend {self.backend}: expected gloo or nccl")

    @property
    def init_method(self) -> str:
        """The rendezvous as torch's init_method: file:// for a path, tcp:// for an address."""
        return f"file://{self.meet}" if "/" in self.meet else f"tcp://{self.meet}"
