"""What a member of a row is told of the exchange that it takes part in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hubring.workers.bench import shapes
from hubring.workers.bench.shapes import Dims
from hubring.workers.peers.seat import Seat


class Job(msgspec.Struct, frozen=True):
    """One model, exchanged by `size` ranks; travels as a JSON argument.

    Attributes:
        shape: A name from `shapes.SHAPES`.
        optimizer: A name from `rows.model.OPTIMIZERS`.
        size: How many ranks there are.
        directory: Where the row's members, and its server, find each other.
        megabytes: MiB of the shape `flat`.
        bucket_bytes: What is handed over at once.
        slice_bytes: What travels at once.
        codec: What gradients are compressed with; empty: nothing.
        device: Where the ranks' tensors are, as torch names it.
    """

    shape: str
    optimizer: str
    size: int
    directory: str
    megabytes: int = 100
    bucket_bytes: int = 25 * 2**20
    slice_bytes: int = 4 * 2**20
    codec: str = ""
    device: str = "cpu"

    @property
    def tensors(self) -> list[Dims]:
        """Every parameter's dimensions."""
        return shapes.find(self.shape).tensors(self.megabytes)

    @property
    def nbytes(self) -> int:
        """Size of the model in float32."""
        return shapes.nbytes(self.shape, self.megabytes)

    @property
    def trained(self) -> bool:
        """Whether whole training steps are taken."""
        return shapes.find(self.shape).trained

    @property
    def place(self) -> Path:
        """The directory as a path."""
        return Path(self.directory)

    @property
    def meet(self) -> Path:
        """The file by which the members of a peer's group find each other."""
        return self.place / "store"

    @property
    def control(self) -> Path:
        """The socket at which the bench listens for the row's members."""
        return self.place / "control"

    def seat(self, rank: int) -> Seat:
        """A rank's place in a peer's group, which has one server if any."""
        backend: Literal["gloo", "nccl"] = "nccl" if self.device == "cuda" else "gloo"
        return Seat(rank=rank, size=self.size, meet=str(self.meet), servers=1, backend=backend)

    def encode(self) -> str:
        """The job as an argument of a command."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, argument: str) -> Job:
        """What `encode` made an argument of."""
        return msgspec.json.decode(argument, type=cls)
