"""Processes that are forked from a process with torch imported.

A new Python process needs more than two seconds of CPU time before it has an optimizer, and a case has thirty
processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from hubring.ps.config.environment import become
from hubring.ps.process.command import module_command
from hubring.workers.compare.run.process import RunProcess

_SERVER = multiprocessing.get_context("forkserver")
# The first optimizer imports torch._dynamo, which is half of that time.
_SERVER.set_forkserver_preload(
    [
        "torch._dynamo",
        "hubring.workers.run_script",
        "hubring.workers.bench.rows.hubring",
        "hubring.workers.bench.member",
    ]
)


class Forked(RunProcess):
    """A child that runs a module's `main()`, like `python -m MODULE ARGUMENTS`; see `RunProcess`."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(name, module_command(module, *arguments), directory)
        self.err.touch()
        passed = (module, list(arguments), str(self.out), str(self.err), dict(environment))
        self._forked = _SERVER.Process(target=_run, args=passed, daemon=True)
        self._forked.start()

    @property
    def pid(self) -> int:
        assert self._forked.pid is not None
        return self._forked.pid

    @property
    def code(self) -> int | None:
        return self._forked.exitcode

    def ask_to_stop(self) -> None:
        self._forked.terminate()

    def end(self, timeout: float) -> None:
        self._forked.join(timeout)
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._forked.join()


def _run(module: str, arguments: list[str], out: str, err: str, environment: dict[str, str]) -> None:
    """In the child: sets the child up like a new process, then runs the module."""
    import torch

    os.setsid()
    for path, target in ((out, 1), (err, 2)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), target)
    become(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch read the fork server's value at import
    sys.argv = [module, *arguments]
    import_module(module).main()
