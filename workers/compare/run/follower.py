"""A follower: its process, which starts programs for the conductor, and how the conductor sees it.

The process reports the exit codes of its programs, and ends with the conductor.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hubring.ps.core import timing
from hubring.ps.core.errors import HubringError
from hubring.ps.core.timing import ClockOffset
from hubring.workers.compare.run.link import (
    AskTime,
    Counted,
    Ended,
    Failed,
    Hello,
    Kill,
    Listen,
    Message,
    Order,
    OtherEndLost,
    Over,
    StartRequest,
    Stop,
    TaskConnection,
    Tell,
    Time,
)
from hubring.workers.compare.run.meeting import LauncherTask, describe_task, join
from hubring.workers.compare.run.noise import NoiseListener, ProcessCounts
from hubring.workers.peers.processes import (
    GRACE_SECONDS,
    POLL_SECONDS,
    Lifeline,
    LocalProcess,
    RunProcess,
    clean_environment,
)

_NOT_STARTED = 127
"""Exit code of a program that could not be started, as in shells."""


def follow(task: LauncherTask, folder: Path) -> dict[str, Any]:
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
        wire.send(describe_task(task, place.host))
        print(f"ps-compare: rank {task.rank} on {socket.gethostname()} follows {place}", file=sys.stderr)
        with Lifeline() as lifeline:
            code = ClusterFollower(wire, lifeline).follow()
    except OtherEndLost as cause:
        raise HubringError(
            f"rank {task.rank} on {socket.gethostname()} exits: rank 0 at {place} is lost: {cause}"
        ) from cause
    finally:
        wire.close()
    return {"rank": task.rank, "conductor": str(place), "exit_code": code}


class ClusterFollower:
    """Runs programs for the conductor on this host.

    Args:
        wire: Connection to the conductor.
        lifeline: Ends the programs if this process is killed.
    """

    def __init__(self, wire: TaskConnection, lifeline: Lifeline) -> None:
        self._wire = wire
        self._lifeline = lifeline
        self._running: dict[str, LocalProcess] = {}
        self._listener = NoiseListener()

    def follow(self) -> int:
        """Carries out orders until the comparison is over; then ends programs that still run.

        Returns:
            The exit code that the conductor sent.

        Raises:
            OtherEndLost: The conductor is lost.
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
            case StartRequest():
                self._start(order)
            case Stop(name=name) if name in self._running:
                self._running[name].ask_to_stop()
            case Kill(name=name) if name in self._running:
                self._running[name].end(0.0)
            case Listen():
                self._listener = NoiseListener()
            case Tell():
                self._wire.send(Counted(sample=self._listener.sample()))
            case AskTime():
                self._wire.send(Time(ns=time.time_ns()))

    def _start(self, order: StartRequest) -> None:
        directory = Path(order.directory)
        try:
            process = LocalProcess(order.name, order.command, directory, clean_environment(order.threads))
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


_ANSWER_SECONDS = 30.0

_Answer = TypeVar("_Answer", Counted, Time)


class FollowerLost(HubringError):
    """A follower is lost; the message names it and how to resume."""


class FollowerHandle:
    """One follower; owns its connection.

    Args:
        hello: Its first message.
        wire: Its connection.
    """

    def __init__(self, hello: Hello, wire: TaskConnection) -> None:
        self.hello = hello
        self._wire = wire
        self._codes: dict[str, int] = {}

    @property
    def name(self) -> str:
        """Name for people."""
        return f"rank {self.hello.rank} on {self.hello.host}"

    def order(self, order: Order) -> None:
        """Sends it an order.

        Raises:
            FollowerLost: The follower is lost.
        """
        try:
            self._wire.send(order)
        except OtherEndLost as cause:
            raise self._gone(cause) from cause

    def start(self, order: StartRequest) -> None:
        """Orders it to start a program; raises as `order`."""
        self._codes.pop(order.name, None)
        self.order(order)

    def code(self, name: str, timeout: float = 0.0) -> int | None:
        """Returns a program's exit code; None if it has not ended within `timeout` seconds.

        Raises:
            FollowerLost: The follower is lost.
            HubringError: The follower reported a failure.
        """
        deadline = time.monotonic() + timeout
        while self._hear(0.0 if name in self._codes else max(0.0, deadline - time.monotonic())):
            pass
        return self._codes.get(name)

    def sample(self) -> ProcessCounts:
        """Returns its noise counts since it got `Listen`; raises as `code`."""
        self.order(Tell())
        return self._answer(Counted).sample

    def clock_offset(self) -> ClockOffset:
        """Measures how far the conductor's clock is ahead of its clock; raises as `code`."""

        def ask() -> int:
            self.order(AskTime())
            return self._answer(Time).ns

        found = timing.measure_offset(ask)
        return ClockOffset(-found.ahead, found.round_trip)

    def close(self) -> None:
        """Closes the connection, which ends all that the follower runs."""
        self._wire.close()

    def _answer(self, kind: type[_Answer]) -> _Answer:
        """Handles messages until one of this kind; raises as `code`."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not isinstance(answer := self._hear(max(0.0, deadline - time.monotonic())), kind):
            if answer is None:
                raise self._gone(OtherEndLost(f"no answer within {_ANSWER_SECONDS:g} s"))
        return answer

    def _hear(self, timeout: float) -> Message | None:
        """Handles and returns one message; None if none arrives in time."""
        try:
            message = self._wire.receive(timeout)
        except OtherEndLost as cause:
            raise self._gone(cause) from cause
        match message:
            case Ended(name=name, code=code):
                self._codes[name] = code
            case Failed(why=why):
                raise HubringError(f"{self.name}: {why}")
        return message

    def _gone(self, cause: OtherEndLost) -> FollowerLost:
        return FollowerLost(
            f"{self.name} is lost ({cause}) and the comparison ends. To resume without repeating finished"
            " runs, start all tasks again with the same --out"
        )


class RemoteProgram(RunProcess):
    """A program that a follower runs.

    Args:
        name: Name for people and for the output files.
        command: Program and arguments.
        directory: Folder for its output, visible to all machines.
        member: The follower that runs it.
        threads: PyTorch threads.
    """

    def __init__(
        self, name: str, command: Sequence[str], directory: Path, member: FollowerHandle, threads: int
    ) -> None:
        super().__init__(name, command, directory)
        self._member = member
        place = str(directory.absolute())
        member.start(StartRequest(name=name, command=self.command, directory=place, threads=threads))

    @property
    def pid(self) -> None:
        return None

    @property
    def code(self) -> int | None:
        return self._member.code(self.name)

    def ask_to_stop(self) -> None:
        with contextlib.suppress(HubringError):  # the programs of a lost follower end with it
            if self.code is None:
                self._member.order(Stop(name=self.name))

    def end(self, timeout: float) -> None:
        with contextlib.suppress(HubringError):
            if self._member.code(self.name, timeout) is None:
                self._member.order(Kill(name=self.name))
                if self._member.code(self.name, GRACE_SECONDS) is None:
                    self._member.close()
