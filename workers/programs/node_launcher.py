"""The workers that one command starts on its host: `ps-worker --nodes N --gpus G --nr R`.

Ranks go as in PyTorch's tutorials: worker i of node r is rank r G + i of N G. Where a launcher started
this command, once a node, it says N and r. Workers do not outlive the command: where it is killed before it
can pass anything on, the kernel sends them SIGTERM.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

from hubring.ps.config import terminal
from hubring.ps.config.environment import environment
from hubring.ps.config.settings import flag
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError, Preempted
from hubring.ps.process.child import Child
from hubring.ps.process.children import Children, passing_on
from hubring.ps.process.command import module_command
from hubring.ps.process.end_with_parent import follow
from hubring.ps.process.output import Output
from hubring.workers.launchers.placement import Placement, detect
from hubring.workers.launchers.torchrun import OURS, told

log = logging.getLogger(__name__)

LAUNCHER = "ps-worker"
_OWN_FLAGS = ("nodes", "gpus", "nr")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PARENT = "HUBRING_PARENT"
"""Variable: the process with which a worker is to end."""


def wanted(config: WorkerConfig) -> bool:
    """Whether this process is to start workers, rather than to be one of those that were started."""
    return config.gpus is not None and environment().get(OURS) != LAUNCHER


def follow_launcher() -> None:
    """Ends this worker when the command that started it ends; others are left alone."""
    follow(int(environment().get(PARENT, 0)))  # a script's own process has the variable too


def places(config: WorkerConfig, outer: Placement) -> list[dict[str, str]]:
    """The variables that tell each worker of this node its place.

    Args:
        config: Its `gpus`, `nodes` and `nr`.
        outer: Where a launcher put this very command.

    Raises:
        ConfigError: The launcher started several on this host, or says another node than the flags.
    """
    if outer.local_size > 1:
        raise ConfigError(
            f"{outer.launcher} started {outer.local_size} commands on this host, and each would start"
            f" --gpus {config.gpus} workers: let it start one a host, or leave --gpus out"
        )
    gpus = config.gpus or 1
    nodes = _agreed("nodes", config.nodes, outer.size, outer.launcher) or 1
    node = _agreed("nr", config.nr, outer.rank, outer.launcher) or 0
    if node >= nodes:
        raise ConfigError(f"--nr {node} of {nodes} node(s): nodes go from 0 to {nodes - 1}; give --nodes")
    return [
        {OURS: LAUNCHER, **told(node * gpus + local, nodes * gpus, local, gpus, node)}
        for local in range(gpus)
    ]


def run(config: WorkerConfig, flags: Mapping[str, object], config_file: Path | None, words: list[str]) -> int:
    """Runs this node's workers to their end; the last line tells the result of each.

    Args:
        config: The settings.
        flags: What the command line gave; None where it gave nothing.
        config_file: From `--config`.
        words: The script and its arguments.

    Returns:
        The exit code: 0 if all ended well, 75 if all who did not were pre-empted, else the first failure's.
    """
    variables = places(config, detect(environment()))
    if not os.path.exists("/dev/nvidia0") and config.backend != "nccl":
        log.info("no GPU here: --gpus %d starts so many worker processes on the CPU", config.gpus)
    command = module_command("hubring.workers.programs.ps_worker", *_again(flags, config_file), "--", *words)
    own = {f"PS_{name.upper()}" for name in _OWN_FLAGS}
    given = {name: value for name, value in environment().items() if name not in own}
    given[PARENT] = str(os.getpid())
    with Children[Worker]() as crew, passing_on(_SIGNALS, crew.signal):
        for number, place in enumerate(variables):
            crew.add(Worker(f"worker {number}", command, {**given, **place}))
        codes = [worker.exit_code() for worker in crew.started]
        code = next((code for code in codes if code not in (0, Preempted.exit_code)), max(codes))
        terminal.last_line({"workers": [worker.result() for worker in crew.started], "exit_code": code})
        return code


def _agreed(name: str, given: int | None, said: int | None, launcher: str) -> int | None:
    if given is not None and said is not None and given != said:
        raise ConfigError(
            f"two sources disagree on the node: {flag(name)} {given}, and {launcher} says {said}; drop one"
        )
    return said if given is None else given


def _again(flags: Mapping[str, object], config_file: Path | None) -> list[str]:
    """The command line once more, less what is this process's own."""
    given = {name: value for name, value in flags.items() if value is not None and name not in _OWN_FLAGS}
    words = [] if config_file is None else ["--config", str(config_file)]
    for name, value in given.items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return words


class Worker(Child):
    """One worker; its standard output goes on to ours, but for the last line, which is its result."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        super().__init__(name, command, variables, stdin=None, stdout=PIPE)
        self._output = Output(self.stdout, sys.stdout.buffer, keeps_last=True)

    def result(self) -> dict[str, Any]:
        """Waits for its end; returns its result, which is empty if it was killed, or never came so far."""
        last = self._output.join()
        try:
            result: dict[str, Any] = json.loads(last)
        except ValueError:
            self._output.write(last)
            return {}
        return result
