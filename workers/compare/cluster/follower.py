"""A follower: starts programs for the conductor and reports their exit codes. It ends with the conductor."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

from hubring.ps.core.errors import HubringError
from hubring.workers.compare.cluster.host import describe
from hubring.workers.compare.cluster.link import Lost, Wire
from hubring.workers.compare.cluster.meeting import join
from hubring.workers.compare.cluster.messages import (
    AskTime,
    Counted,
    Ended,
    Failed,
    Kill,
    Listen,
    Message,
    Over,
    Start,
    Stop,
    Tell,
    Time,
)
from hubring.workers.compare.cluster.task import Task
from hubring.workers.compare.run.child_reaper_start import Lifeline
from hubring.workers.compare.run.noise import Listener
from hubring.workers.compare.run.process import GRACE_SECONDS, POLL_SECONDS, Process
from hubring.workers.compare.run.runner import clean_environment

_NOT_STARTED = 127
"""Exit code of a program that could not be started, as in shells."""


def follow(task: Task, folder: Path) -> dict[str, Any]:
    """Follows rank 0 until the comparison is over.

    Args:
        task: This process's task.
        folder: Folder that all machines share.

    Returns:
        The result for the last line.

    Raises:
        HubringError: There is no conductor, or it is lost.
    """
    wire, place = join(task, folder)
    try:
        wire.send(describe(task, place.host))
        print(f"ps-compare: rank {task.rank} on {socket.gethostname()} follows {place}", file=sys.stderr)
        with Lifeline() as lifeline:
            code = Follower(wire, lifeline).follow()
    except Lost as cause:
        raise HubringError(
            f"rank {task.rank} on {socket.gethostname()} exits: rank 0 at {place} is lost: {cause}"
        ) from cause
    finally:
        wire.close()
    return {"rank": task.rank, "conductor": str(place), "exit_code": code}


class Follower:
    """Runs programs for the conductor on this host.

    Args:
        wire: Connection to the conductor.
        lifeline: Ends the programs if this process is killed.
    """

    def __init__(self, wire: Wire, lifeline: Lifeline) -> None:
        self._wire = wire
        self._lifeline = lifeline
        self._running: dict[str, Process] = {}
        self._listener = Listener()

    def follow(self) -> int:
        """Carries out orders until the comparison is over; then ends programs that still run.

        Returns:
            The exit code that the conductor sent.

        Raises:
            Lost: The conductor is lost.
        """
        try:
            while True:
                order = self._wire.receive(POLL_SECONDS)
                if isinstance(order, Over):
                    return order.code
                if order is not None:
                    self._obey(order)
                self._report()
        finally:
            for process in self._running.values():
                process.ask_to_stop()
            for process in list(self._running.values()):
                process.end(GRACE_SECONDS)
                self._lifeline.release(process.pid)

    def _obey(self, order: Message) -> None:
        match order:
            case Start():
                self._start(order)
            case Stop(name=name) if name in self._running:
                self._running[name].ask_to_stop()
            case Kill(name=name) if name in self._running:
                self._running[name].end(0.0)
            case Listen():
                self._listener = Listener()
            case Tell():
                self._wire.send(Counted(sample=self._listener.sample()))
            case AskTime():
                self._wire.send(Time(ns=time.time_ns()))

    def _start(self, order: Start) -> None:
        directory = Path(order.directory)
        try:
            process = Process(order.name, order.command, directory, clean_environment(order.threads))
        except OSError as cause:
            unseen = "" if directory.is_dir() else "; --out must be a folder that all machines share"
            self._wire.send(Failed(why=f"{order.name} cannot be started ({cause}){unseen}"))
            self._wire.send(Ended(name=order.name, code=_NOT_STARTED))  # the conductor waits for its end
            return
        self._lifeline.hold(process.pid)
        self._running[order.name] = process

    def _report(self) -> None:
        ended = {name: process.code for name, process in self._running.items() if process.code is not None}
        for name, code in ended.items():
            self._lifeline.release(self._running.pop(name).pid)
            self._wire.send(Ended(name=name, code=code))
