"""The models of the bench, as the shapes of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from hubring.ps.core.errors import UsageError

MEBI = 2**20
FLOAT_BYTES = 4

Dims = tuple[int, ...]


class Shape(NamedTuple):
    """One model.

    Attributes:
        about: One-line description.
        tensors: Returns every parameter's dimensions, given the size of `flat` in MiB.
        steps: Steps per turn, chosen so that turns of all shapes take about the same time.
        trained: Whether whole training steps are timed, not only the exchange.
        needs: The optional module that loads its data, a key of `extras.EXTRAS`; None: none.
        coded: Whether the wires with compressed rows are compared with and without compression.
    """

    about: str
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
    "flat": Shape("one tensor", flat),
    "coded": Shape("the same, gradients compressed on the wire", flat, coded=True),
    "resnet50": Shape("the 161 tensors of ResNet-50", lambda _: resnet50()),
    "thousand": Shape("1,000 tensors of 25,000 elements", lambda _: [(25_000,)] * 1000),
    "thousand-flat": Shape("one tensor of as many bytes", lambda _: [(25_000_000,)]),
    "lone": Shape("one tensor of 4 KB: latency", lambda _: [(1024,)], steps=200),
    "digits": Shape(
        "end to end: the built-in job", lambda _: digits(), steps=30, trained=True, needs="sklearn"
    ),
    "mlp": Shape("end to end: a perceptron of 25 million parameters", lambda _: mlp(), trained=True),
}


def find(name: str) -> Shape:
    """Returns the shape with this name.

    Raises:
        UsageError: No shape has this name.
    """
    if name not in SHAPES:
        raise UsageError(f"--cases: no shape {name!r}; expected one of {', '.join(SHAPES)}")
    return SHAPES[name]


def nbytes(name: str, megabytes: int) -> int:
    """Returns the size of a model in bytes of float32."""
    return FLOAT_BYTES * sum(prod(dims) for dims in find(name).tensors(megabytes))
