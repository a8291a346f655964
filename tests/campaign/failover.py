"""Kills shards that have a standby: python -m tests.campaign.failover --kills 100 --seed 1.

Each run is one job of two or three workers on two shards with `--standby 1`. One shard or standby is killed
at a moment that the seed chooses. The run fails unless all programs end with 0 and no acknowledged step is
lost: in mode `bsp` the parameters are those of an undisturbed run bit by bit, in the other modes the ledger
has each push as often as it should (`tests.campaign.ledger`). The pause is the longest step of any worker.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.campaign import ledger, states
from tests.campaign.evidence import State
from tests.campaign.job import SCRIPT
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.orphans import take_in_orphans

STEPS = 40
PACE = 0.02
SHARDS = 2
MODES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bsp": ((), ()),
    "aggregate": ((), ("--aggregate",)),
    "asp": (("--mode", "asp"), ()),
    "ssp": (("--mode", "ssp", "--staleness", "1"), ()),
    "backup": (("--mode", "backup", "--backup", "1"), ()),
}
"""Flags of the server and of the workers, by mode."""
WIRES = ("shm", "zmq", "grpc")


@dataclass(frozen=True)
class Kill:
    """What one run does.

    Attributes:
        seed: Chooses all else.
        mode: A name in MODES.
        wire: The workers' transport.
        workers: Their number.
        victim: `shard`, `standby`, or empty for an undisturbed run.
        number: Which shard, or whose standby.
        step: The step that rank 0 has completed.
        delay: Seconds after that.
        kills: How many shards with this number are killed, one after another: each has a new standby by then.
    """

    seed: int
    mode: str
    wire: str
    workers: int
    victim: str = ""
    number: int = 0
    step: int = 0
    delay: float = 0.0
    kills: int = 1

    @classmethod
    def drawn(cls, seed: int) -> Kill:
        """Returns what a seed does. Modes and wires take turns."""
        draw = random.Random(seed)
        modes = list(MODES)
        victim = "standby" if draw.random() < 0.15 else "shard"
        return cls(
            seed,
            mode=modes[seed % len(modes)],
            wire=WIRES[seed // len(modes) % len(WIRES)],
            workers=draw.choice((2, 3)),
            victim=victim,
            number=draw.randrange(SHARDS),
            step=draw.randrange(2, STEPS - 8),
            delay=draw.uniform(0.0, 0.05),
            kills=2 if victim == "shard" and draw.random() < 0.2 else 1,
        )

    @property
    def steps(self) -> int:
        """The job's. Asynchronous modes diverge after some 200."""
        return STEPS if self.kills == 1 else 4 * STEPS

    @property
    def pace(self) -> float:
        """Seconds of a step. A new standby needs some time."""
        return PACE if self.kills == 1 else 3 * PACE

    @property
    def synchronous(self) -> bool:
        return self.mode in ("bsp", "aggregate")

    def __str__(self) -> str:
        twice = " and its successor" * (self.kills == 2)
        moment = (
            f"{self.victim} {self.number}{twice} after step {self.step}" if self.victim else "undisturbed"
        )
        return f"{self.mode:9} {self.wire:4} {self.workers} workers, {moment}"


@dataclass(frozen=True)
class Result:
    """How a run went. `pause` is in seconds."""

    kill: Kill
    wrong: Sequence[str]
    pause: float


class Failovers:
    """Plays kills."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._references: dict[tuple[str, int, int], State] = {}

    def play(self, kill: Kill) -> Result:
        """Plays one kill and checks what it left."""
        reference = self._reference(kill) if kill.synchronous else None
        with tempfile.TemporaryDirectory(prefix="failover-") as name:
            try:
                return self._play(kill, Path(name), reference)
            except (AssertionError, TimeoutError) as error:
                return Result(kill, [str(error)], 0.0)

    def _reference(self, kill: Kill) -> State:
        kind = kill.mode, kill.workers, kill.kills
        if kind not in self._references:
            with tempfile.TemporaryDirectory(prefix="failover-") as name:
                calm = Kill(0, kill.mode, "shm", kill.workers, kills=kill.kills)
                assert not (wrong := self._play(calm, Path(name), None).wrong), wrong
                self._references[kind] = next(iter(states.finals(Path(name), _names(calm)).values()))
        return self._references[kind]

    def _play(self, kill: Kill, folder: Path, reference: State | None) -> Result:
        cluster = Cluster(folder, self._fork_server)
        server_flags, worker_flags = MODES[kill.mode]
        saved = folder / "saved"
        standby = ("--standby", "1") if kill.victim else ()
        server, address = cluster.server(
            *("--workers", str(kill.workers), "--shards", str(SHARDS), "--once", "--no-page", *standby),
            *("--slice-bytes", "4096", "--checkpoint-dir", str(saved), "--checkpoint-every", "0.5"),
            *server_flags,
        )
        workers = []
        for rank, name in enumerate(_names(kill)):
            flags = ["--rank", str(rank), "--transport", kill.wire, "--timeout", "30", *worker_flags]
            script = [SCRIPT, str(folder), name, str(kill.workers), str(kill.steps), str(kill.pace), ""]
            workers.append(cluster.worker(address, *flags, *script, name=name))
        try:
            if kill.victim:
                _strike(kill, cluster, server, address, folder)
            codes = {program.name: program.wait() for program in (*workers, server)}
            wrong = [f"{name} exited with {code}" for name, code in codes.items() if code]
            wrong += _wrong(kill, folder, saved, reference)
            if kill.victim == "shard" and (found := server.result().get("failovers")) != kill.kills:
                wrong.append(f"the server reports {found} failovers")
            if wrong:
                wrong += [f"{program.name}: {program.said()[-1500:]}" for program in cluster.programs]
        finally:
            cluster.kill()
        return Result(kill, wrong, states.longest_step(folder, _names(kill)))


def _names(kill: Kill) -> list[str]:
    return [f"rank-{rank}" for rank in range(kill.workers)]


def _strike(kill: Kill, cluster: Cluster, server: Program, address: str, folder: Path) -> None:
    server.until(lambda: states.progress(folder, "rank-0") > kill.step, f"step {kill.step} of rank 0")
    for _ in range(kill.kills):
        server.until(lambda: _row_of(kill, cluster, address)["standby"] is not None, "standby")
        row = _row_of(kill, cluster, address)
        pid = row["pid"] if kill.victim == "shard" else row["standby"]["pid"]
        time.sleep(kill.delay)
        os.kill(pid, signal.SIGKILL)
        server.until(lambda: "has taken its place" in server.said() or kill.victim != "shard", "failover")


def _row_of(kill: Kill, cluster: Cluster, address: str) -> dict[str, Any]:
    """Returns the status of the shard."""
    rows: list[dict[str, Any]] = cluster.status(address)["shards"]
    return rows[kill.number]


def _wrong(kill: Kill, folder: Path, saved: Path, reference: State | None) -> list[str]:
    """Returns which acknowledged steps are lost, and which count twice."""
    finals = states.finals(folder, _names(kill))
    if kill.synchronous:
        if reference is None:
            return []
        return [
            f"{name}: {each} differs from the undisturbed run"
            for name, state in finals.items()
            for each, tensor in state.items()
            if not torch.equal(tensor.view(torch.uint8), reference[each].view(torch.uint8))
        ]
    state, *_ = states.checkpoint(saved)
    if state is None:
        return ["there is no last checkpoint"]
    values = state["ledger"]
    if kill.mode == "backup":
        return ledger.counted_wrongly(values, kill.steps, -1) + ledger.foreign(values, kill.steps)
    trails = states.trails(folder, _names(kill)).values()
    acknowledged = ((look.step, trail.rank) for trail in trails for look in trail.looks)
    return (
        ledger.applied_wrongly(values, kill.steps, mean=False)
        + ledger.missing(values, acknowledged)
        + ledger.foreign(values, kill.steps)
    )


def report(results: Sequence[Result]) -> str:
    """Returns a table of modes and wires: kills, runs that failed, and pauses in seconds."""
    lines = [
        "| mode | wire | kills | failed | median pause | 95th percentile | longest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    kinds = [(mode, wire) for mode in MODES for wire in WIRES]
    for mode, wire in kinds:
        these = [one for one in results if (one.kill.mode, one.kill.wire) == (mode, wire)]
        if these:
            lines.append(_row(mode, wire, these))
    lines.append(_row("all", "shards", [one for one in results if one.kill.victim == "shard"]))
    lines.append(_row("all", "standbys", [one for one in results if one.kill.victim == "standby"]))
    return "\n".join(lines)


def _row(mode: str, wire: str, results: Sequence[Result]) -> str:
    pauses = sorted(one.pause for one in results if not one.wrong)
    failed = sum(bool(one.wrong) for one in results)
    if not pauses:
        return f"| {mode} | {wire} | {len(results)} | {failed} | | | |"
    late = pauses[min(len(pauses) - 1, int(0.95 * len(pauses)))]
    numbers = f"{statistics.median(pauses):.2f} | {late:.2f} | {pauses[-1]:.2f}"
    return f"| {mode} | {wire} | {len(results)} | {failed} | {numbers} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.failover")
    parser.add_argument("--kills", type=int, default=15, help="number of kills")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first kill")
    arguments = parser.parse_args()
    take_in_orphans()
    results = []
    with ForkServer() as fork_server:
        failovers = Failovers(fork_server)
        for seed in range(arguments.seed, arguments.seed + arguments.kills):
            result = failovers.play(Kill.drawn(seed))
            results.append(result)
            print(f"seed {seed:4}  {result.kill}: {'WRONG' if result.wrong else f'{result.pause:.2f} s'}")
            sys.stdout.writelines(f"    {line}\n" for line in result.wrong)
            sys.stdout.flush()
    print(report(results))
    sys.exit(any(result.wrong for result in results))


if __name__ == "__main__":
    main()
