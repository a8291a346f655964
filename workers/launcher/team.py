"""The workers of one job on this machine: started together, and ended together when one fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

from workers.launcher.stream import Stream

GRACE_SECONDS = 15.0
"""How long workers get to end by themselves once another has failed."""


class Worker:
    """One worker process and its outputs.

    Args:
        rank: Its rank.
        command: Program and arguments.
        environment: All of its variables.
        folder: Where copies of its outputs go; None: nowhere.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], folder: Path | None
    ) -> None:
        self.rank = rank
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,  # a Ctrl-C in the terminal is ours to pass on, once
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        outputs = (
            ("stdout", self._process.stdout, sys.stdout.buffer),
            ("stderr", self._process.stderr, sys.stderr.buffer),
        )
        self._streams = [
            Stream(source, target, f"[{rank}]<{name}>:", folder / name if folder is not None else None)
            for name, source, target in outputs
        ]

    def wait(self) -> int:
        """Its exit code, 128+n if signal n ended it, once it has ended and everything it said is out."""
        code = self._process.wait()
        for stream in self._streams:
            stream.join()
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Passes a signal on; one that has ended is not missed."""
        self._process.send_signal(number)


class Team:
    """Some workers, waited for as one.

    Args:
        commands: One for each rank.
        environments: Likewise.
        folder: Where outputs are copied to, as rank.N/stdout and rank.N/stderr; None: nowhere.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        folder: Path | None = None,
    ) -> None:
        self._ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._workers: list[Worker] = []
        width = len(str(len(commands) - 1))
        try:
            for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
                place = None if folder is None else folder / f"rank.{rank:0{width}}"
                self._workers.append(Worker(rank, command, environment, place))
        except BaseException:
            self.signal(signal.SIGKILL)
            raise
        for worker in self._workers:
            threading.Thread(target=self._watch, args=(worker,), name=f"wait {worker.rank}").start()

    def signal(self, number: int) -> None:
        """Passes a signal on to all."""
        for worker in self._workers:
            worker.signal(number)

    def wait(self, on_failure: Callable[[int, int], None]) -> int:
        """Waits for all; when one fails, the others are ended.

        Args:
            on_failure: Told rank and exit code of the first one that fails.

        Returns:
            Its exit code; 0 if none fails.
        """
        first = 0
        killer = threading.Timer(GRACE_SECONDS, self.signal, (signal.SIGKILL,))
        for _ in self._workers:
            rank, code = self._ended.get()
            if code and not first:
                first = code
                on_failure(rank, code)
                self.signal(signal.SIGTERM)
                killer.start()
        killer.cancel()
        return first

    def _watch(self, worker: Worker) -> None:
        self._ended.put((worker.rank, worker.wait()))
