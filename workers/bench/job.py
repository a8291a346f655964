"""The description of an exchange for the members of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hubring.workers.bench import shapes
from hubring.workers.bench.shapes import Dims
from hubring.workers.peers.seat import Seat


class Job(msgspec.Struct, frozen=True):
    """One model that `size` ranks exchange; passed as a JSON argument.

    Attributes:
        shape: A name from `shapes.SHAPES`.
        optimizer: A name from `rows.model.OPTIMIZERS`.
        size: Number of ranks.
        directory: Folder in which the row's members and server find each other.
        megabytes: Size of the shape `flat` in MiB.
        bucket_bytes: Bucket size in bytes.
        slice_bytes: Slice size in bytes.
        codec: Codec of the gradients; empty: no compression.
        device: torch device of the ranks' tensors.
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
        """The dimensions of every parameter."""
        return shapes.find(self.shape).tensors(self.megabytes)

    @property
    def nbytes(self) -> int:
        """Size of the model in bytes of float32."""
        return shapes.nbytes(self.shape, self.megabytes)

    @property
    def trained(self) -> bool:
        """Whether the shape is timed with whole training steps."""
        return shapes.find(self.shape).trained

    @property
    def place(self) -> Path:
        """The directory as a path."""
        return Path(self.directory)

    @property
    def meet(self) -> Path:
        """The rendezvous file of a peer's group."""
        return self.place / "store"

    @property
    def control(self) -> Path:
        """The socket on which the bench listens for the row's members."""
        return self.place / "control"

    def seat(self, rank: int) -> Seat:
        """Returns a rank's seat in a peer's group, which has at most one server."""
        backend: Literal["gloo", "nccl"] = "nccl" if self.device == "cuda" else "gloo"
        return Seat(rank=rank, size=self.size, meet=str(self.meet), servers=1, backend=backend)

    def encode(self) -> str:
        """Returns the job as a command-line argument."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, argument: str) -> Job:
        """Parses the result of `encode`."""
        return msgspec.json.decode(argument, type=cls)
