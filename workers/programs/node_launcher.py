"""Starts the workers of one host: `ps-worker --nodes N --gpus G --nr R`.

Ranks follow PyTorch's tutorials: worker i of node r is rank r G + i of N G. If a launcher starts this
command once per node, N and r come from the launcher. Workers do not outlive the command: if the command
is killed before it can forward a signal, the kernel sends SIGTERM to the workers.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import Any

from hubring.ps.config import terminal
from hubring.ps.config.declaration import flag, flag_words
from hubring.ps.config.environment import environment
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError, Preempted
from hubring.ps.process.child import Child, Children, passing_on
from hubring.ps.process.launch import PARENT_VARIABLE, STOP_SIGNALS, module_command
from hubring.ps.process.output import ChildOutput, SharedScreen
from hubring.workers.launchers.known_launchers import LAUNCHER_VARIABLE, meeting_variables, place_variables
from hubring.workers.launchers.placement import Placement, detect

log = logging.getLogger(__name__)

LAUNCHER = "ps-worker"
_OWN_FLAGS = ("nodes", "gpus", "nr", "restarts")


def wanted(config: WorkerConfig) -> bool:
    """Whether this process starts workers, rather than being one of the started workers."""
    return config.gpus is not None and environment().get(LAUNCHER_VARIABLE) != LAUNCHER


def places(config: WorkerConfig, outer: Placement) -> list[dict[str, str]]:
    """Returns the environment variables that give each worker of this node its rank and sizes.

    Args:
        config: The settings; `gpus`, `nodes` and `nr` are used.
        outer: The placement of this command by an outer launcher.

    Raises:
        ConfigError: The launcher started several commands on this host, or the flags contradict it.
    """
    if outer.local_size > 1:
        raise ConfigError(
            f"{outer.launcher} started {outer.local_size} commands on this host, and each would start"
            f" --gpus {config.gpus} workers; start one command per host, or remove --gpus"
        )
    gpus = config.gpus or 1
    nodes = _agreed("nodes", config.nodes, outer.size, outer.launcher) or 1
    node = _agreed("nr", config.nr, outer.rank, outer.launcher) or 0
    if node >= nodes:
        raise ConfigError(f"--nr {node} of {nodes} node(s): expected 0 to {nodes - 1}; set --nodes")
    return [
        {LAUNCHER_VARIABLE: LAUNCHER, **place_variables(node * gpus + local, nodes * gpus, local, gpus, node)}
        for local in range(gpus)
    ]


def run(config: WorkerConfig, flags: Mapping[str, object], config_file: Path | None, words: list[str]) -> int:
    """Runs this node's workers until they end. The last line holds the result of each.

    Args:
        config: The settings.
        flags: Field name to the value on the command line; None if the flag is absent.
        config_file: The value of `--config`.
        words: More words of the workers' command line: `--`, the script and its arguments.

    Returns:
        The exit code: 0 if all workers succeeded, 75 if every other worker was pre-empted, else the exit
        code of the failed worker with the lowest rank.
    """
    variables = places(config, detect(environment()))
    if config.accelerator != "cpu":
        from hubring.workers.runtime.topology import check_gpus

        check_gpus(len(variables))
    command = module_command("hubring.workers.programs.ps_worker", *_again(flags, config_file), *words)
    own = {f"PS_{name.upper()}" for name in _OWN_FLAGS}
    given = {name: value for name, value in environment().items() if name not in own}
    given[PARENT_VARIABLE] = str(os.getpid())
    lost: list[OSError] = []

    def lose_output(error: OSError) -> None:
        lost.append(error)
        crew.signal(signal.SIGTERM)

    with ExitStack() as until_end, Children[NodeWorker]() as crew, passing_on(STOP_SIGNALS, crew.signal):
        if variables[0]["WORLD_SIZE"] == str(len(variables)):  # else other hosts would not know it
            given |= until_end.enter_context(meeting_variables(given))
        screen = SharedScreen(sys.stdout.buffer, lose_output)
        for number, place in enumerate(variables):
            crew.add(NodeWorker(f"worker {number}", command, {**given, **place}, screen))
        codes = [worker.exit_code() for worker in crew.started]
        code = next((code for code in codes if code not in (0, Preempted.exit_code)), max(codes))
        if lost:
            log.error("standard output cannot be written (%s); the workers were stopped", lost[0])
            return 128 + signal.SIGPIPE if isinstance(lost[0], BrokenPipeError) else os.EX_IOERR
        terminal.last_line({"workers": [worker.result() for worker in crew.started], "exit_code": code})
        return code


def _agreed(name: str, given: int | None, launched: int | None, launcher: str) -> int | None:
    if given is not None and launched is not None and given != launched:
        raise ConfigError(
            f"two sources disagree on the node: {flag(name)} is {given}, but {launcher} reports {launched};"
            f" remove {flag(name)}"
        )
    return launched if given is None else given


def _again(flags: Mapping[str, object], config_file: Path | None) -> list[str]:
    """Returns the command line without the flags that only this process uses."""
    given = {name: value for name, value in flags.items() if value is not None and name not in _OWN_FLAGS}
    return [*([] if config_file is None else ["--config", str(config_file)]), *flag_words(given)]


class NodeWorker(Child):
    """One worker. Its standard output is forwarded, except for the last line, which is its result."""

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], screen: SharedScreen
    ) -> None:
        super().__init__(name, command, variables, stdin=None, stdout=PIPE)
        self._output = ChildOutput(self.stdout, screen, keeps_result=True)

    def result(self) -> dict[str, Any]:
        """Waits until the worker ends, and returns its result; empty if it ended without a result."""
        return self._output.result()
