"""Measures the constants of this machine, and the step of a job without exchange (`ps-compare calibrate`).

A store is called as a shard's loop calls it, so these are the hub's own kernels. All times are the processor
time of one thread, so other programs do not count.

All figures are measured several times in turns, so that a noisy moment affects all of them and shows in
their spread. A figure is the median. Processor time is that of both processes, minus what the server
computed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import torch
from msgspec import convert
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hubring.ps.core.errors import DeadlineExceeded, HubringError
from hubring.ps.core.messages import Init, Push
from hubring.ps.core.types import BucketSpec, Hyper, Member, Sender, Slice, TensorSpec, View
from hubring.ps.process.launch import module_command
from hubring.ps.store.consistency import BSP
from hubring.ps.store.store import KVStore
from hubring.ps.transport.decode import decode_request
from hubring.ps.transport.encode import encode_reply, encode_request
from hubring.workers.compare.plan.experiment import find_job
from hubring.workers.compare.plan.setting import LINE_BYTES, PAYLOAD_BYTES, Link
from hubring.workers.compare.predict import pair
from hubring.workers.compare.predict.calibrations import Constants, WireCosts
from hubring.workers.peers import machine
from hubring.workers.peers.processes import LocalProcess, ProcessFailed, clean_environment

NUMEL = 1 << 20
"""Elements of a key: 4 MiB, a slice."""
KEYS = 8
"""Together larger than a cache, like a model."""
NBYTES = 4 * NUMEL * KEYS
MANY = 3
"""Ranks whose gradients are summed."""
MESSAGES = 200

_DECAY = {"weight_decay": 0.0, "maximize": 0.0}
_ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": 0.0, **_DECAY}
OPTIMIZERS: Mapping[str, Hyper] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": 0.0, **_DECAY},
    "Adam": {**_ADAM, "decoupled_weight_decay": 0.0},
    "AdamW": {**_ADAM, "decoupled_weight_decay": 1.0},
}


class StoreRounds:
    """Rounds of one store: every rank pushes every key.

    Args:
        ranks: Number of ranks.
        optimizer: Name from OPTIMIZERS.
        numel: Elements of each key.
        keys: Number of keys.
    """

    def __init__(self, ranks: int, optimizer: str, numel: int = NUMEL, keys: int = KEYS) -> None:
        self._hyper = OPTIMIZERS[optimizer]
        self._senders = [Sender(rank, 1) for rank in range(ranks)]
        self._gradients = [[torch.ones(numel) for _ in range(keys)] for _ in self._senders]
        self._clock = 0
        self._store = KVStore(BSP())
        self._store.on_view(View(1, tuple(Member(*sender) for sender in self._senders)))
        spec = BucketSpec(0, "float32", optimizer, (TensorSpec("ones", (numel * keys,)),))
        self._store.assign([Slice(key, 0, key * numel, numel, 0) for key in range(keys)], [spec])
        for key in range(keys):
            self._store.handle(Init(self._senders[0], key, torch.zeros(numel)), "init")

    def take(self) -> float:
        """Runs one round of every key; returns its seconds."""
        began = time.thread_time()
        for key in range(len(self._gradients[0])):
            for sender, gradients in zip(self._senders, self._gradients, strict=True):
                self._handle(sender, key, gradients[key])
        self._clock += 1
        return time.thread_time() - began

    def _handle(self, sender: Sender, key: int, gradient: Tensor) -> None:
        message = encode_request(Push(sender, key, self._clock, gradient, self._hyper), 0)
        number, request = decode_request(message)
        assert isinstance(request, Push)
        for _, reply in self._store.handle(request, "push"):
            encode_reply(reply, number)


EPOCHS = 2
TIMEOUT = 120.0
"""Seconds."""


def own_step(job: str) -> tuple[float, float, float]:
    """Returns the seconds of a step: median, lower and upper quartile.

    Args:
        job: A built-in job.

    Raises:
        UsageError: There is no such job.
        ProcessFailed: The job failed.
        DeadlineExceeded: The job took too long.
        HubringError: The job took too few steps.
    """
    find_job(job)
    with tempfile.TemporaryDirectory(prefix="calibrate-") as directory:
        record = Path(directory) / "record.jsonl"
        words = ["--job", job, "--record", str(record), "--", "--epochs", str(EPOCHS)]
        environment = clean_environment(machine.cores())
        process = LocalProcess(
            job, module_command("hubring.workers.programs.ps_worker", *words), Path(directory), environment
        )
        try:
            if not process.wait(TIMEOUT):
                raise DeadlineExceeded(
                    f"{job} took longer than {TIMEOUT:g} s for {EPOCHS} epochs; calibrate without --job, and"
                    " set --compute in predict"
                )
        finally:
            process.end(0.0)
        if process.code:
            raise ProcessFailed(f"{job} {process.ended}; its error output:\n{process.err.read_text()}")
        reports = [json.loads(line) for line in record.read_text().splitlines()]
    # Only steps that follow a step: after a measurement of the model, its time would be included.
    steps = [
        after["seconds"] - before["seconds"]
        for before, after in pairwise(reports)
        if "samples" in before and "samples" in after
    ]
    if len(steps) < 4:
        raise HubringError(f"the job took {len(steps)} steps in {EPOCHS} epochs; expected at least 4")
    low, _, high = quantiles(steps)
    return median(steps), low, high


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
    measured: Measured = defaultdict(list)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a shard, and in a worker if there are as many workers as cores
    try:
        report("copies, sums and steps")
        _rates(measured, turns)
        report(", ".join(TRANSPORTS))
        _transports(measured, turns)
        report("gloo")
        _ring(measured, turns)
        if address is not None:
            report(f"the link to {address}")
            with closing(pair.ShardConnection("zmq", address)) as line:
                for _ in range(turns):
                    measured["link.alpha"].append(_timed(line.exchange_small, SMALL_TIMES) / 2)
                    measured["link.beta"].append(_streaming(line))
    finally:
        torch.set_num_threads(threads)
    return constants_of({name: values[1:] for name, values in measured.items()})


def constants_of(measured: Mapping[str, list[float]]) -> Constants:
    """Returns the medians of all measurements; figures have the names of `Constants.spread`."""
    value = {name: median(values) for name, values in measured.items()}
    costs = ("alpha", "beta", "cpu")
    wires = {
        name: convert({cost: value.get(f"{name}.{cost}", 0.0) for cost in costs}, WireCosts)
        for name in (*TRANSPORTS, "gloo")
    }
    linked = "link.alpha" in measured
    return Constants(
        wires=wires,
        link=_link_of(wires["zmq"], value["link.alpha"], value["link.beta"]) if linked else None,
        copy=value["copy"],
        reduce=value["reduce"],
        apply={name.lower(): value[f"apply.{name.lower()}"] for name in OPTIMIZERS},
        serve=value["serve"],
        cores=machine.cores(),
        spread={name: (min(values), max(values)) for name, values in measured.items()},
        machine=machine.describe(),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


OUTRUN = 1.2
"""A link is limited by processors, not by its rate, below this ratio of its time per byte to theirs."""


def _link_of(wire: WireCosts, alpha: float, beta: float) -> Link:
    """Returns the link to another host, given the same wire within this host."""
    rate = 8 / beta * LINE_BYTES / PAYLOAD_BYTES if beta > OUTRUN * wire.beta else None
    return Link(rate=rate, latency=max(0.0, alpha - wire.alpha))


def _rates(measured: Measured, turns: int) -> None:
    """Measures copies, sums, small messages and steps, each by the byte or message."""
    source, target = torch.ones(KEYS * NUMEL), torch.zeros(KEYS * NUMEL)
    alone, many = StoreRounds(1, "SGD"), StoreRounds(MANY, "SGD")
    small = StoreRounds(1, "SGD", numel=1024, keys=MESSAGES)
    stepping = {f"apply.{name.lower()}": StoreRounds(1, name) for name in OPTIMIZERS}
    for _ in range(turns):
        began = time.thread_time()
        target.copy_(source)
        measured["copy"].append((time.thread_time() - began) / NBYTES)
        measured["reduce"].append(max(0.0, many.take() - alone.take()) / (MANY - 1) / NBYTES)
        measured["serve"].append(small.take() / MESSAGES)  # decoding, handling, reply
        for name, rounds in stepping.items():
            measured[name].append(rounds.take() / NBYTES)


def _transports(measured: Measured, turns: int) -> None:
    with pair.lines(TRANSPORTS) as (shard, lines):
        for _ in range(turns):
            for name, line in lines.items():
                measured[f"{name}.alpha"].append(_timed(line.exchange_small, SMALL_TIMES) / 2)
                if name == "shm":  # which moves no bytes
                    continue
                before = shard.cpu()
                measured[f"{name}.beta"].append(_streaming(line))
                used = (shard.cpu() - before) / LARGE_TIMES / pair.LARGE_BYTES
                # Averaging one gradient is a copy.
                measured[f"{name}.cpu"].append(max(0.0, used - median(measured["copy"])) / 2)


def _ring(measured: Measured, turns: int) -> None:
    with pair.ring_of_two() as (other, ring):
        small, large = torch.zeros(RING_SMALL), torch.zeros(RING_LARGE)

        def take(tensor: torch.Tensor, times: int) -> float:
            other.tell(f"{times} {tensor.numel()}")
            began = time.perf_counter()
            pair.reduce(ring, tensor, times)
            seconds = (time.perf_counter() - began) / times
            other.hear()
            return seconds

        for _ in range(turns):
            measured["gloo.alpha"].append(take(small, SMALL_TIMES) / 2)  # 2(n-1) hops
            before = other.cpu()
            measured["gloo.beta"].append(take(large, LARGE_TIMES) / large.nbytes)
            # Each of two ranks sends 2(n-1)/n of the tensor, so both together send twice its bytes.
            measured["gloo.cpu"].append((other.cpu() - before) / LARGE_TIMES / large.nbytes / 2)


def _streaming(line: pair.ShardConnection) -> float:
    """Returns seconds a byte each way: n slices there and back take the time of n + 1."""
    seconds = _timed(line.exchange_large, LARGE_TIMES) / pair.LARGE_BYTES
    return seconds * pair.KEYS / (pair.KEYS + 1)


def _timed(act: Callable[[], None], times: int) -> float:
    """Returns the mean seconds of a call."""
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times


def show_constants(constants: Constants) -> None:
    """Prints one line per figure, with median, minimum and maximum."""
    table = Table("figure", "median", "min", "max", "unit", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, value in _figures(constants).items():
        scale, unit = _unit(name)
        low, high = constants.spread.get(name, (value, value))
        table.add_row(name, *(f"{scale * each:.3g}" for each in (value, low, high)), unit)
    console = Console(stderr=True, highlight=False)
    console.print(table)
    console.print("alpha: one message one way. beta: a byte, both ways at once. cpu: both ends.", style="dim")


def _figures(constants: Constants) -> dict[str, float]:
    """Returns medians by their names in the spread."""
    found = {"copy": constants.copy, "reduce": constants.reduce, "serve": constants.serve}
    found |= {f"apply.{name}": value for name, value in constants.apply.items()}
    for name, wire in constants.wires.items():
        found |= {f"{name}.{figure}": value for figure, value in asdict(wire).items() if value}
    if (link := constants.link) is not None:
        found |= {"link.latency": link.latency} | ({} if link.rate is None else {"link.rate": link.rate})
    return found | ({} if constants.compute is None else {"compute": constants.compute})


_UNITS = {"compute": (1e3, "ms per step"), "link.rate": (1e-9, "Gbit/s")}


def _unit(name: str) -> tuple[float, str]:
    if name in _UNITS:
        return _UNITS[name]
    if name.endswith(("alpha", "latency")) or name == "serve":
        return 1e6, "us a message"
    return 1e9, "ns a byte"
