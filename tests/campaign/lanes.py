"""Plays seeds in lanes: processes side by side, since most of a run is spent waiting."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.campaign.runs import Runs
from tests.campaign.table import Result
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.orphans import take_in_orphans


def play(seeds: Sequence[int], lanes: int, kept: Path, tell: Callable[[Result], None]) -> list[Result]:
    """Plays each seed, and tells its result. Ctrl-C ends the runs in progress, which do not count.

    Args:
        seeds: The seeds.
        lanes: The number of processes.
        kept: The folder for the output of runs with a violation.
        tell: Called with each result.

    Returns:
        The results in the order of the seeds.
    """
    spawn = multiprocessing.get_context("spawn")
    ends: dict[Connection, int] = {}
    for number in range(min(lanes, len(seeds))):
        reader, writer = spawn.Pipe(duplex=False)
        lane = spawn.Process(target=_lane, args=(seeds[number::lanes], kept, writer))
        lane.start()
        writer.close()
        assert lane.pid is not None
        ends[reader] = lane.pid
    results: dict[int, Result] = {}
    while ends:
        try:
            _take(ends, results, tell)
        except KeyboardInterrupt:
            for pid in ends.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
    return [results[seed] for seed in seeds if seed in results]


def _take(ends: dict[Connection, int], results: dict[int, Result], tell: Callable[[Result], None]) -> None:
    """Takes results until a lane ends."""
    for reader in wait(list(ends)):
        assert isinstance(reader, Connection)
        try:
            result: Result = reader.recv()
        except EOFError:
            del ends[reader]
        else:
            results[result.scenario.seed] = result
            tell(result)


def _lane(seeds: Sequence[int], kept: Path, results: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_in_orphans()
    with ForkServer() as fork_server:
        Runs(fork_server, kept).play(seeds, results.send)
