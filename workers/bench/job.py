"""What the members of a row exchange: the models, the job, and the lines of text between bench and member.

Lines pass through a socket. Standard input does not work, since `mpirun` forwards it only to one rank. A
process that waits for a line is blocked, so that a row takes no CPU time during the turns of other rows.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from hubring.ps.core.errors import ConnectionLost, DeadlineExceeded, UsageError
from hubring.workers.peers.rendezvous import PeerRendezvous

MEBI = 2**20
FLOAT_BYTES = 4

Dims = tuple[int, ...]


class ModelShape(NamedTuple):
    """One model.

    Attributes:
        tensors: Returns every parameter's dimensions, given the size of `flat` in MiB.
        steps: Steps per turn, chosen so that turns of all shapes take about the same time.
        trained: Whether whole training steps are timed, not only the exchange.
        needs: The optional module that loads its data, a key of `extras.EXTRAS`; None: none.
        coded: Whether the wires with compressed rows are compared with and without compression.
    """

    tensors: Callable[[int], list[Dims]]
    steps: int = 3
    trained: bool = False
    needs: str | None = None
    coded: bool = False


MLP = (1024, 4096, 1000)
"""Inputs, hidden units of two layers, outputs: 25,076,712 parameters."""
SAMPLES = {"digits": 32, "mlp": 16}
"""Samples in one rank's share of a batch."""


def resnet50() -> list[Dims]:
    """Returns the 161 parameters of ResNet-50 in registration order (He et al., 2016; torchvision's v1.5)."""
    tensors: list[Dims] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = 4 * width
            tensors += [(width, channels, 1, 1), (width,), (width,)]
            tensors += [(width, width, 3, 3), (width,), (width,)]
            tensors += [(out, width, 1, 1), (out,), (out,)]
            if block == 0:  # the shortcut changes the number of channels
                tensors += [(out, channels, 1, 1), (out,), (out,)]
            channels = out
    return [*tensors, (1000, channels), (1000,)]


def mlp() -> list[Dims]:
    """Returns weights and biases of the perceptron."""
    first, hidden, last = MLP
    return [(hidden, first), (hidden,), (hidden, hidden), (hidden,), (last, hidden), (last,)]


def digits() -> list[Dims]:
    """Returns the parameters of the network of the job `digits`."""
    return [(16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (10, 512), (10,)]


def flat(megabytes: int) -> list[Dims]:
    """Returns one tensor."""
    return [(megabytes * MEBI // FLOAT_BYTES,)]


SHAPES = {
    "flat": ModelShape(flat),
    "coded": ModelShape(flat, coded=True),
    "resnet50": ModelShape(lambda _: resnet50()),
    "thousand": ModelShape(lambda _: [(25_000,)] * 1000),
    "thousand-flat": ModelShape(lambda _: [(25_000_000,)]),
    "lone": ModelShape(lambda _: [(1024,)], steps=200),
    "digits": ModelShape(lambda _: digits(), steps=30, trained=True, needs="sklearn"),
    "mlp": ModelShape(lambda _: mlp(), trained=True),
}


def find_shape(name: str) -> ModelShape:
    """Returns the shape with this name.

    Raises:
        UsageError: No shape has this name.
    """
    if name not in SHAPES:
        raise UsageError(f"--cases: no shape {name!r}; expected one of {', '.join(SHAPES)}")
    return SHAPES[name]


def shape_bytes(name: str, megabytes: int) -> int:
    """Returns the size of a model in bytes of float32."""
    return FLOAT_BYTES * sum(prod(dims) for dims in find_shape(name).tensors(megabytes))


class BenchJob(msgspec.Struct, frozen=True):
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
        return find_shape(self.shape).tensors(self.megabytes)

    @property
    def nbytes(self) -> int:
        """Size of the model in bytes of float32."""
        return shape_bytes(self.shape, self.megabytes)

    @property
    def trained(self) -> bool:
        """Whether the shape is timed with whole training steps."""
        return find_shape(self.shape).trained

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

    def seat(self, rank: int, backend: Literal["gloo", "nccl", "hubring"] = "gloo") -> PeerRendezvous:
        """Returns a rank's seat in a peer's group, which has at most one server."""
        backend = "nccl" if self.device == "cuda" else backend
        return PeerRendezvous(rank=rank, size=self.size, meet=str(self.meet), servers=1, backend=backend)

    def encode(self) -> str:
        """Returns the job as a command-line argument."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, argument: str) -> BenchJob:
        """Parses the result of `encode`."""
        return msgspec.json.decode(argument, type=cls)


class MemberLine:
    """One end of a connection.

    Args:
        connected: Its socket, which it takes over.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._connection = Connection(connected.detach())

    @classmethod
    def dial(cls, path: Path) -> MemberLine:
        """Connects to the socket at `path`."""
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        dialled.connect(str(path))
        return cls(dialled)

    def tell(self, text: str) -> None:
        """Sends one line.

        Raises:
            ConnectionLost: The other end has closed.
        """
        try:
            self._connection.send_bytes(text.encode())
        except OSError as cause:
            raise ConnectionLost("the other end of the socket is closed") from cause

    def hear(self, timeout: float | None = None) -> str:
        """Waits for the next line, and returns it.

        Raises:
            ConnectionLost: The other end has closed.
            DeadlineExceeded: No line arrived within `timeout` seconds.
        """
        try:
            if not self._connection.poll(timeout):
                raise DeadlineExceeded(f"a member did not answer within {timeout:g} s")
            return self._connection.recv_bytes().decode()
        except (OSError, EOFError) as cause:
            raise ConnectionLost("the other end of the socket is closed") from cause

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
