"""Calibration: measures the constants of this machine, in less than a minute.

All figures are measured several times in turns, so that a noisy moment affects all of them and shows in
their spread. A figure is the median. Processor time is that of both processes, minus what the server
computed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from statistics import median

import torch

from hubring.workers.compare.cost.calibrate import pair, partner, rates
from hubring.workers.compare.cost.calibrate.peer import line_to, link_of
from hubring.workers.compare.cost.model.constants import Constants, Wire
from hubring.workers.compare.run import machine

TURNS = 7
"""Measurements of each figure. The first does not count, because it touches new memory."""
SMALL_TIMES, LARGE_TIMES = 100, 2
RING_SMALL, RING_LARGE = 1024, 8 << 20
"""Elements."""
TRANSPORTS = ("shm", "zmq", "grpc")

Measured = dict[str, list[float]]
"""All measurements of each figure."""


def calibrate(
    turns: int = TURNS, report: Callable[[str], None] = lambda _: None, address: str | None = None
) -> Constants:
    """Measures this machine.

    Args:
        turns: Measurements of each figure, at least 2.
        report: Called with the name of the next measurement.
        address: Address of another host that serves (`peer`), to measure the link to it; None: no link.

    Raises:
        PartnerLost: The process at the other end of a wire ended.
        ServerUnreachable: It cannot be reached by one of the transports.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a shard, and in a worker if there are as many workers as cores
    try:
        measured = _measured(turns, report, address)
    finally:
        torch.set_num_threads(threads)
    return constants_of({name: values[1:] for name, values in measured.items()})


def _measured(turns: int, report: Callable[[str], None], address: str | None) -> Measured:
    measured: Measured = defaultdict(list)
    report("copies, sums and steps")
    _rates(measured, turns)
    report(", ".join(TRANSPORTS))
    _transports(measured, turns)
    report("gloo")
    _ring(measured, turns)
    if address is not None:
        report(f"the link to {address}")
        _link(measured, turns, address)
    return measured


def constants_of(measured: Mapping[str, list[float]]) -> Constants:
    """Returns the medians of all measurements; figures have the names of `Constants.spread`."""
    value = {name: median(values) for name, values in measured.items()}
    optimizers = [name.lower() for name in rates.OPTIMIZERS]
    wires = {name: _wire(value, name) for name in (*TRANSPORTS, "gloo")}
    linked = "link.alpha" in measured
    return Constants(
        wires=wires,
        link=link_of(wires["zmq"], measured["link.alpha"], measured["link.beta"]) if linked else None,
        copy=value["copy"],
        reduce=value["reduce"],
        apply={name: value[f"apply.{name}"] for name in optimizers},
        serve=value["serve"],
        cores=machine.cores(),
        spread={name: (min(values), max(values)) for name, values in measured.items()},
        machine=machine.describe(),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def _wire(value: Mapping[str, float], name: str) -> Wire:
    beta, cpu = value.get(f"{name}.beta", 0.0), value.get(f"{name}.cpu", 0.0)
    return Wire(alpha=value[f"{name}.alpha"], beta=beta, cpu=cpu)


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
                if name != "shm":  # shm moves no bytes
                    _stream(measured, name, shard, line)


def _stream(measured: Measured, name: str, shard: pair.Partner, line: pair.Line) -> None:
    before = shard.cpu()
    seconds = _streaming(line)
    used = (shard.cpu() - before) / LARGE_TIMES / pair.LARGE_BYTES
    measured[f"{name}.beta"].append(seconds)
    # Averaging one gradient is a copy.
    measured[f"{name}.cpu"].append(max(0.0, used - median(measured["copy"])) / 2)


def _link(measured: Measured, turns: int, address: str) -> None:
    with line_to(address) as line:
        for _ in range(turns):
            measured["link.alpha"].append(_timed(line.exchange_small, SMALL_TIMES) / 2)
            measured["link.beta"].append(_streaming(line))


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
            # Each of two ranks sends 2(n-1)/n of the tensor, so both together send twice its bytes.
            measured["gloo.cpu"].append((other.cpu() - before) / LARGE_TIMES / large.nbytes / 2)


def _streaming(line: pair.Line) -> float:
    """Returns seconds a byte each way: n slices there and back take the time of n + 1."""
    seconds = _timed(line.exchange_large, LARGE_TIMES) / pair.LARGE_BYTES
    return seconds * partner.KEYS / (partner.KEYS + 1)


def _timed(act: Callable[[], None], times: int) -> float:
    """Returns the mean seconds of a call."""
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times
