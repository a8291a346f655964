"""Measures the cost of the status page for a job with many simulated workers.

    cost.py WORKERS SHARDS BLOCKS SECONDS COMPUTE [shared]

The hub is real. The workers are threads of this process, each with its own rank, heartbeats and connections
to the shards. In lockstep, all workers sleep for COMPUTE seconds, the computing time of an accelerator, and
push one gradient. Turns of SECONDS alternate: no page is open; one browser's stream is read; or one stream is
read and metrics are requested every five seconds, like Prometheus. With two or more cores the hub has its own
core, and shards and workers share the others; with `shared` all processes share all cores.

Prints one JSON object: the median step and the hub process's CPU time of each turn, and the time that page
and metrics add to a step, with its 95 % interval, and as a share of all cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hubring.ps.client.client import KVClient
from hubring.ps.client.session import Session
from hubring.ps.core.types import BucketSpec, Slicing, TensorSpec
from hubring.ps.core.work import Work
from hubring.ps.job.job import Reason
from hubring.ps.transport.registry import choose

NUMEL = 4096
KINDS = ("no page", "page", "page and metrics")
SCRAPED_EVERY = 5.0
LIMIT = 60.0
HYPER = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}


class SimulatedWorker:
    """A worker that computes nothing."""

    def __init__(self, address: str, size: int) -> None:
        self.session = Session(address, job="simulated", topology="hub", world_size=size)
        dial = choose(self.session.shards).dial
        self._client = KVClient(self.session.sender, len(self.session.shards), dial)
        self._gradient, self._values = torch.ones(NUMEL), torch.zeros(NUMEL)

    def agree(self, shards: int) -> None:
        bucket = BucketSpec(0, "float32", 0, "SGD", (TensorSpec("weight", (NUMEL,)),))
        self._slices = self.session.plan([bucket], Slicing(4 * NUMEL // shards)).plan.slices

    def init(self) -> None:
        self._each(
            "beginning", lambda piece, part, work: self._client.init(piece.shard, piece.key, part, work)
        )

    def pull(self) -> None:
        self._each("a pull", lambda piece, part, work: self._client.pull(piece.shard, piece.key, part, work))

    def push(self) -> Work:
        work = Work("a push", len(self._slices), self._client.attend)
        with self._client.batched():
            for piece in self._slices:
                part = slice(piece.offset, piece.offset + piece.numel)
                self._client.push_pull(
                    piece.shard, piece.key, self._gradient[part], self._values[part], HYPER, work
                )
        return work

    def stepped(self, step: int) -> None:
        self.session.step, self.session.loss = step, 1.0 / step

    def leave(self) -> None:
        self._client.close()
        self.session.leave(Reason.FINISHED)
        self.session.close()

    def _each(self, what: str, call: Any) -> None:
        work = Work(what, len(self._slices), self._client.attend)
        for piece in self._slices:
            call(piece, self._values[piece.offset : piece.offset + piece.numel], work)
        work.wait(LIMIT)


class Watched:
    """Reads a stream of the page, and optionally requests metrics periodically."""

    def __init__(self, page: str, metrics: bool) -> None:
        self._page = page
        self._metrics = metrics
        self._over = threading.Event()
        self.frames = self.scrapes = 0

    def __enter__(self) -> Watched:
        host, _, port = self._page.removeprefix("http://").rpartition(":")
        self._stream = socket.create_connection((host, int(port)))
        self._stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self._threads = [threading.Thread(target=run) for run in self._runs()]
        for thread in self._threads:
            thread.start()
        return self

    def _runs(self) -> list[Callable[[], None]]:
        return [self._read, self._scrape] if self._metrics else [self._read]

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._stream.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._stream.close()

    def _read(self) -> None:
        while data := self._stream.recv(1 << 20):
            self.frames += data.count(b"data: ")

    def _scrape(self) -> None:
        while not self._over.is_set():
            with urllib.request.urlopen(f"{self._page}/metrics", timeout=LIMIT) as answer:
                answer.read()
            self.scrapes += 1
            self._over.wait(SCRAPED_EVERY)


def processor_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process; see proc(5), /proc/pid/schedstat."""
    return (
        sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    )


def part(server: int) -> None:
    """Pins the hub's process to one core, and its shards and this process to the others."""
    cores = sorted(os.sched_getaffinity(0))
    shards = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    for pid, allowed in [(str(server), cores[:1]), *((pid, cores[1:]) for pid in (*shards, "self"))]:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the process has ended
                os.sched_setaffinity(int(thread.name), allowed)


@contextlib.contextmanager
def hub(workers: int, shards: int) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """Starts a server; yields its process, address and page."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "address"
        flags = ["--port", "0", "--once", "--workers", str(workers), "--shards", str(shards), "--page-public"]
        command = [sys.executable, "-m", "hubring.ps.cli", "start", *flags, "--address-file", str(file)]
        log = Path(folder) / "log"
        with log.open("w") as out, subprocess.Popen(command, stderr=out, stdout=subprocess.DEVNULL) as server:
            while "metrics   " not in log.read_text():
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            page = re.findall(r"metrics   (\S+)/metrics", log.read_text())[0]
            try:
                yield server, file.read_text().strip(), page
            finally:
                server.terminate()


def steps_for(
    all_workers: Sequence[SimulatedWorker], done: int, seconds: float, compute: float
) -> list[float]:
    """Takes steps in lockstep for `seconds`, and returns the duration of each."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        time.sleep(compute)
        for work in [each.push() for each in all_workers]:
            work.wait(LIMIT)
        for each in all_workers:
            each.stepped(done + len(took) + 1)
        took.append(time.perf_counter() - began)
    return took


def measure(
    workers: int, shards: int, blocks: int, seconds: float, compute: float, apart: bool
) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    cores = len(os.sched_getaffinity(0))
    with hub(workers, shards) as (server, address, page), ThreadPoolExecutor(workers) as pool:
        if apart:
            part(server.pid)
        all_workers = list(pool.map(lambda _: SimulatedWorker(address, workers), range(workers)))
        for call in (lambda each: each.agree(shards), SimulatedWorker.init, SimulatedWorker.pull):
            list(pool.map(call, all_workers))
        done = len(steps_for(all_workers, 0, 1.0, compute))
        for turn in range(len(KINDS) * blocks):
            # Forward and backward, so that drift favours no kind.
            kind = (*KINDS, *reversed(KINDS))[turn % (2 * len(KINDS))]
            watched = None if kind == "no page" else Watched(page, metrics=kind == "page and metrics")
            with watched or contextlib.nullcontext():
                before, began = processor_seconds(server.pid), time.perf_counter()
                took = steps_for(all_workers, done, seconds, compute)
                used = (processor_seconds(server.pid) - before) / (time.perf_counter() - began)
            done += len(took)
            turns.append(
                {
                    "kind": kind,
                    "steps": len(took),
                    "step_ms": 1000 * statistics.median(took),
                    "hub_cpu_ms_per_s": 1000 * used,
                    "frames": watched.frames if watched else 0,
                    "scrapes": watched.scrapes if watched else 0,
                }
            )
        list(pool.map(SimulatedWorker.leave, all_workers))
        server.wait(LIMIT)
    found = {"workers": workers, "shards": shards, "hub_apart": apart, "cores": cores, "steps": done}
    return {**found, "turns": turns, **summary(turns, cores)}


def summary(turns: Sequence[dict[str, Any]], cores: int) -> dict[str, Any]:
    """Returns the medians over the turns of each kind, and the added time."""
    steps, used = (
        {kind: [turn[what] for turn in turns if turn["kind"] == kind] for kind in KINDS}
        for what in ("step_ms", "hub_cpu_ms_per_s")
    )
    return {
        kind: {
            "step_ms": statistics.median(steps[kind]),
            "hub_cpu_ms_per_s": statistics.median(used[kind]),
            "step_added": added(steps[kind], steps["no page"]),
            "share_of_cores": (statistics.median(used[kind]) - statistics.median(used["no page"]))
            / (1000 * cores),
        }
        for kind in KINDS
    }


def added(watched: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    """Returns the difference of the medians, with its 95 % bootstrap interval."""
    draw = random.Random(0)
    blocks = [range(len(plain)), *([draw.randrange(len(plain)) for _ in plain] for _ in range(2000))]
    found = [
        statistics.median(watched[block] for block in drawn)
        / statistics.median(plain[block] for block in drawn)
        - 1
        for drawn in blocks
    ]
    low, *_, high = statistics.quantiles(found[1:], n=40)
    return found[0], low, high


if __name__ == "__main__":
    workers, shards, blocks = map(int, sys.argv[1:4])
    seconds, compute = map(float, sys.argv[4:6])
    shared = "shared" in sys.argv[6:]
    apart = not shared and len(os.sched_getaffinity(0)) > 1
    print(json.dumps(measure(workers, shards, blocks, seconds, compute, apart)))
