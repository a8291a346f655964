"""A process's place among the members of a peer's group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hubring.ps.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a peer is told of its place.

    Attributes:
        rank: This worker's.
        size: How many workers there are.
        meet: Where they find each other: `HOST:PORT`, or a file that all of them see.
        host: This worker's address, through whose interface alone it then talks; None: whatever is fastest.
        servers: Server processes, where the peer has any.
        backend: Of a process group: `gloo` or `nccl`.
        timeout: Seconds that one exchange may take.
        aggregate: A server only averages, as the script wants the mean in its hands.

    Raises:
        UsageError: There is no such place.
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
            raise UsageError(f"--rank {self.rank} of --world-size {self.size}: ranks go from 0 on")
        if self.backend not in ("gloo", "nccl"):
            raise UsageError(f"--backend {self.backend}: allowed are gloo and nccl")

    @property
    def init_method(self) -> str:
        """The meeting place as torch spells it: of a path its file, else the address."""
        return f"file://{self.meet}" if "/" in self.meet else f"tcp://{self.meet}"
