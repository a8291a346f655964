"""Plays many scenarios, in lanes: processes side by side, since most of a run is spent waiting."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.campaign.evidence import State
from tests.campaign.invariants import violations
from tests.campaign.play import play as play_one
from tests.campaign.scenario import Scenario, undisturbed
from tests.campaign.table import Result
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.process_tree import take_in_orphans
from tests.support.processes.stopwatch import Stopwatch


class Runs:
    """Plays scenarios, and keeps the output of runs with a violation.

    Args:
        fork_server: Starts the programs.
        kept: The folder for that output.
    """

    def __init__(self, fork_server: ForkServer, kept: Path) -> None:
        self._fork_server = fork_server
        self._kept = kept
        self._references: dict[tuple[str, int], State] = {}

    def play(self, scenarios: Iterable[Scenario], tell: Callable[[Result], None]) -> list[Result]:
        """Plays each, and tells its result. Ctrl-C ends the run in progress, which does not count."""
        results: list[Result] = []
        with suppress(KeyboardInterrupt):
            for scenario in scenarios:
                results.append(self._one(scenario))
                tell(results[-1])
        return results

    def _one(self, scenario: Scenario) -> Result:
        watch = Stopwatch()
        # What is left of a job may still write to the folder.
        with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            try:
                reference = self._reference(scenario, folder / "undisturbed")
                evidence = play_one(scenario, folder, self._fork_server, reference)
                found = violations(evidence)
            except (TimeoutError, AssertionError) as error:  # the job did not come to the fault
                found = {"valid": [str(error).partition("\n")[0] or type(error).__name__]}
            except Exception:  # a fault of the campaign's own must not end the other runs
                found = {"valid": [traceback.format_exc()]}
            if found:
                self._keep(folder, scenario.seed, found)
        return Result(scenario, found, watch.seconds)

    def _keep(self, folder: Path, seed: int, found: dict[str, list[str]]) -> None:
        """Keeps a run's output, or adds why it could not."""
        target = self._kept / f"seed-{seed}"
        try:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("saved", "*.safetensors"))
        except OSError as error:  # shutil.Error is one
            found.setdefault("valid", []).append(f"not all of its output could be kept: {error}")

    def _reference(self, scenario: Scenario, folder: Path) -> State | None:
        """Returns the parameters of the undisturbed run, which is played in `folder` once for each kind.

        Raises:
            AssertionError: That run violates an invariant, or its workers differ.
            TimeoutError: That run does not train.
        """
        if not scenario.synchronous:
            return None
        kind = scenario.mode, scenario.workers
        if kind not in self._references:
            folder.mkdir()
            evidence = play_one(undisturbed(scenario), folder, self._fork_server)
            found = violations(evidence)
            assert not found, f"the undisturbed run violates {found}"
            self._references[kind] = next(iter(evidence.last.states.values()))
        return self._references[kind]


def play(
    scenarios: Sequence[Scenario], lanes: int, kept: Path, tell: Callable[[Result], None]
) -> list[Result]:
    """Plays each scenario, and tells its result. Ctrl-C ends the runs in progress, which do not count.

    Args:
        scenarios: What to play.
        lanes: The number of processes.
        kept: The folder for the output of runs with a violation.
        tell: Called with each result.

    Returns:
        The results in the order of the scenarios.
    """
    spawn = multiprocessing.get_context("spawn")
    ends: dict[Connection, int] = {}
    for number in range(min(lanes, len(scenarios))):
        reader, writer = spawn.Pipe(duplex=False)
        lane = spawn.Process(target=_lane, args=(scenarios[number::lanes], kept, writer))
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
    return [results[each.seed] for each in scenarios if each.seed in results]


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


def _lane(scenarios: Sequence[Scenario], kept: Path, results: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_in_orphans()
    with ForkServer() as fork_server:
        Runs(fork_server, kept).play(scenarios, results.send)
