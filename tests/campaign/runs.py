"""Plays many seeds, one after another."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tests.campaign.evidence import State
from tests.campaign.invariants import violations
from tests.campaign.play import play
from tests.campaign.scenario import Scenario, drawn, undisturbed
from tests.campaign.table import Result
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.stopwatch import Stopwatch


class Runs:
    """Plays seeds, and keeps the output of runs with a violation.

    Args:
        fork_server: Starts the programs.
        kept: The folder for that output.
    """

    def __init__(self, fork_server: ForkServer, kept: Path) -> None:
        self._fork_server = fork_server
        self._kept = kept
        self._references: dict[tuple[str, int], State] = {}

    def play(self, seeds: Iterable[int], tell: Callable[[Result], None]) -> list[Result]:
        """Plays each seed, and tells its result. Ctrl-C ends the run in progress, which does not count."""
        results: list[Result] = []
        with suppress(KeyboardInterrupt):
            for seed in seeds:
                results.append(self._one(drawn(seed)))
                tell(results[-1])
        return results

    def _one(self, scenario: Scenario) -> Result:
        watch = Stopwatch()
        # What is left of a job may still write to the folder.
        with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            try:
                reference = self._reference(scenario, folder / "undisturbed")
                evidence = play(scenario, folder, self._fork_server, reference)
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
            evidence = play(undisturbed(scenario), folder, self._fork_server)
            found = violations(evidence)
            assert not found, f"the undisturbed run violates {found}"
            self._references[kind] = next(iter(evidence.last.states.values()))
        return self._references[kind]
