"""Calibration: measures the constants of the machine at hand, in well under a minute.

Everything is measured several times in turns, so that a noisy moment hits all figures and is seen in their
spread. A figure is the median; processor time is what both processes used meanwhile, less what the
server computed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from statistics import median

import torch

from workers.compare import machine
from workers.compare.cost import pair, partner, rates
from workers.compare.cost.constants import Constants, Wire

TURNS = 7
"""Measurements of each figure; the first, which touches new memory, does not count."""
SMALL_TIMES, LARGE_TIMES = 100, 2
RING_SMALL, RING_LARGE = 1024, 8 << 20
"""Elements."""
TRANSPORTS = ("shm", "zmq", "grpc")

Measured = dict[str, list[float]]
"""All measurements of each figure."""


def calibrate(turns: int = TURNS, tell: Callable[[str], None] = lambda _: None) -> Constants:
    """Measures this machine.

    Args:
        turns: Measurements of each figure, at least 2.
        tell: Called with what is measured next.

    Raises:
        PartnerLost: The process at the other end of a wire ended.
        ServerUnreachable: It cannot be reached by one of the transports.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a shard's, and a worker's where there are as many as cores
    try:
        measured = _measured(turns, tell)
    finally:
        torch.set_num_threads(threads)
    return constants_of({name: values[1:] for name, values in measured.items()})


def _measured(turns: int, tell: Callable[[str], None]) -> Measured:
    measured: Measured = defaultdict(list)
    tell("copies, sums and steps")
    _rates(measured, turns)
    tell(", ".join(TRANSPORTS))
    _transports(measured, turns)
    tell("gloo")
    _ring(measured, turns)
    return measured


def constants_of(measured: Mapping[str, list[float]]) -> Constants:
    """Medians of all measurements, by the names that `Constants.spread` has."""
    value = {name: median(values) for name, values in measured.items()}
    optimizers = [name.lower() for name in rates.OPTIMIZERS]
    return Constants(
        wires={
            name: Wire(
                alpha=value[f"{name}.alpha"],
                beta=value.get(f"{name}.beta", 0.0),
                cpu=value.get(f"{name}.cpu", 0.0),
            )
            for name in (*TRANSPORTS, "gloo")
        },
        copy=value["copy"],
        reduce=value["reduce"],
        apply={name: value[f"apply.{name}"] for name in optimizers},
        serve=value["serve"],
        cores=machine.cores(),
        spread={name: (min(values), max(values)) for name, values in measured.items()},
        machine=machine.describe(),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def _rates(measured: Measured, turns: int) -> None:
    figures = {"copy": rates.copying(), "reduce": rates.reducing(), "serve": rates.serving()}
    figures |= {f"apply.{name.lower()}": rates.stepping(name) for name in rates.OPTIMIZERS}
    for _ in range(turns):
        for name, measure in figures.items():
            measured[name].append(measure())


def _transports(measured: Measured, turns: int) -> None:
    with pair.lines(TRANSPORTS) as (shard, lines):
        for _ in range(turns):
            for name, line in lines.items():
                seconds = _timed(line.exchange_small, SMALL_TIMES)
                measured[f"{name}.alpha"].append(seconds / 2)
                if name != "shm":  # which moves no byte
                    _stream(measured, name, shard, line)


def _stream(measured: Measured, name: str, shard: pair.Partner, line: pair.Line) -> None:
    before = shard.cpu()
    seconds = _timed(line.exchange_large, LARGE_TIMES)
    used = (shard.cpu() - before) / LARGE_TIMES / pair.LARGE_BYTES
    measured[f"{name}.beta"].append(seconds / pair.LARGE_BYTES)
    # The mean of one gradient is a copy.
    measured[f"{name}.cpu"].append(max(0.0, used - median(measured["copy"])) / 2)


def _ring(measured: Measured, turns: int) -> None:
    with pair.ring_of_two() as (other, ring):
        small, large = torch.zeros(RING_SMALL), torch.zeros(RING_LARGE)

        def take(tensor: torch.Tensor, times: int) -> float:
            other.tell(f"{times} {tensor.numel()}")
            began = time.perf_counter()
            partner.reduce(ring, tensor, times)
            seconds = (time.perf_counter() - began) / times
            other.hear()
            return seconds

        for _ in range(turns):
            measured["gloo.alpha"].append(take(small, SMALL_TIMES) / 2)  # 2(n-1) hops
            before = other.cpu()
            measured["gloo.beta"].append(take(large, LARGE_TIMES) / large.nbytes)
            # Each of two ranks sends 2(n-1)/n of the tensor: both together twice its bytes.
            measured["gloo.cpu"].append((other.cpu() - before) / LARGE_TIMES / large.nbytes / 2)


def _timed(act: Callable[[], None], times: int) -> float:
    """Seconds that it takes, on average over some times."""
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times
