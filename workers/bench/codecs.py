"""Cost and ratio of each codec on one core: `python -m hubring.workers.bench.codecs`.

Every codec encodes the same gradients of 100 MB (25 million float32, normal) in slices of 4 MB, like the
hub's plan, with error feedback where training uses it. Codecs take turns. The first round is a warm-up and
does not count. Results on one core of an AMD EPYC with AVX-512, shared with other processes:

    codec          ratio   encode      min   decode      min
                             (ms)     (ms)     (ms)     (ms)
    copy             1.0      9.7      9.6      9.7      9.5
    bf16             2.0      6.9      6.8      6.3      6.1
    fp16             2.0      8.5      8.1      6.5      6.4
    int8             4.0     38.3     36.2      9.1      8.9
    sign            30.1     36.9     36.3     12.6     12.4
    topk:0.01       50.0     59.3     57.0      5.6      5.2
    topk:0.001     500.0     59.5     46.6      5.0      5.0
    powersgd:4     125.0     79.4     79.1     18.7     18.2

A worker runs `encode` before it sends. A shard runs `decode` once for every contribution, and each worker
runs it once if means return compressed. PowerSGD has 25 matrices of 1000 x 1000; its `encode` computes both
factors, its `decode` the product and the residual. Memory bandwidth limits the time: the first row is a copy
of the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.compression.compressor import ErrorFeedback, by_name
from hubring.ps.core.types import BucketSpec, TensorSpec, parse_codec
from hubring.workers.communicators.powersgd import LowRankMean

SIDE = 1000
MATRICES = 25
NUMEL = MATRICES * SIDE * SIDE
CODECS = ("copy", "bf16", "fp16", "int8", "sign", "topk:0.01", "topk:0.001", "powersgd:4")


class Cost(NamedTuple):
    """One codec's row; times in ms for 100 MB."""

    row: str
    ratio: float
    encode_ms: float
    encode_min_ms: float
    decode_ms: float
    decode_min_ms: float

    def __str__(self) -> str:
        return f"{self.row:<12}{self.ratio:>8.1f}" + "".join(f"{each:>9.1f}" for each in self[2:])


HEAD = (
    f"{'codec':<12}{'ratio':>8}{'encode':>9}{'min':>9}{'decode':>9}{'min':>9}\n"
    f"{'':<12}{'':>8}{'(ms)':>9}{'(ms)':>9}{'(ms)':>9}{'(ms)':>9}"
)


class Copy:
    """The lower limit: one copy of the bytes in each direction."""

    def __init__(self, gradients: Tensor, out: Tensor) -> None:
        self.nbytes = gradients.nbytes
        self._gradients, self._out = gradients, out

    def encode(self) -> None:
        """Copies the gradients."""
        self._out.copy_(self._gradients)

    decode = encode


class Sliced:
    """A codec on slices, as in a worker and a shard."""

    def __init__(self, name: str, gradients: Tensor, out: Tensor) -> None:
        self._codec = by_name(name)
        length = self._codec.nbytes(SIDE * SIDE)
        feedback = partial(ErrorFeedback, self._codec, SIDE * SIDE, torch.float32)
        self._slices = [
            (source, target, torch.empty(length, dtype=torch.uint8), feedback())
            for source, target in zip(gradients.view(MATRICES, -1), out.view(MATRICES, -1), strict=True)
        ]
        self.nbytes = length * len(self._slices)

    def encode(self) -> None:
        """Encodes every slice, and stores the error."""
        for source, _, payload, feedback in self._slices:
            feedback.encode(source, payload)

    def decode(self) -> None:
        """Decodes every slice."""
        for _, target, payload, _ in self._slices:
            self._codec.decode(payload, target)


class Factored:
    """PowerSGD with one rank."""

    def __init__(self, name: str, gradients: Tensor) -> None:
        tensors = tuple(TensorSpec(f"matrix {index}", (SIDE, SIDE)) for index in range(MATRICES))
        spec = BucketSpec(0, "float32", "", tensors)
        rank = int(parse_codec(name).argument)
        self._gradients = gradients.clone()
        self._mean = LowRankMean(
            spec, gradients.dtype, rank, lambda numel, dtype: torch.zeros(numel, dtype=dtype)
        )
        self.nbytes = sum(phase.nbytes for phase in self._mean.phases)

    def encode(self) -> None:
        """Computes the P factors, then the Q factors."""
        self._mean.project(self._gradients)
        self._mean.refine()

    def decode(self) -> None:
        """Computes the gradients from the factors."""
        self._mean.rebuild(self._gradients)


def main(argv: list[str] | None = None) -> None:
    """Prints the table, and its rows as JSON in the last line."""
    parser = argparse.ArgumentParser(prog="python -m hubring.workers.bench.codecs", description="Time codecs")
    parser.add_argument("--rounds", type=int, default=9, help="timed turns of each codec [default: 9]")
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="codecs, as for --compress")
    options = parser.parse_args(argv)
    costs = measure(options.codecs, options.rounds)
    print(HEAD, *costs, sep="\n")
    print(json.dumps([cost._asdict() for cost in costs]))


def measure(names: Sequence[str], rounds: int) -> list[Cost]:
    """Times every codec on one thread, in turns."""
    torch.set_num_threads(1)
    gradients = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) * 1e-3
    out = torch.empty_like(gradients)
    subjects = [_subject(name, gradients, out) for name in names]
    turns = [[(_ms(one.encode), _ms(one.decode)) for one in subjects] for _ in range(1 + rounds)][1:]
    costs = []
    for name, subject, times in zip(names, subjects, zip(*turns, strict=True), strict=True):
        encode, decode = zip(*times, strict=True)
        ratio = gradients.nbytes / subject.nbytes
        costs.append(Cost(name, ratio, median(encode), min(encode), median(decode), min(decode)))
    return costs


def _subject(name: str, gradients: Tensor, out: Tensor) -> Copy | Sliced | Factored:
    if name == "copy":
        return Copy(gradients, out)
    if name.startswith("powersgd:"):
        return Factored(name, gradients)
    return Sliced(name, gradients, out)


def _ms(act: Callable[[], object]) -> float:
    began = perf_counter()
    act()
    return (perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
