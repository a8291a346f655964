"""A follower as seen by the conductor, and the programs that it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hubring.ps.core import clock_offset
from hubring.ps.core.clock_offset import Offset
from hubring.ps.core.errors import HubringError
from hubring.workers.compare.cluster.link import Lost, Wire
from hubring.workers.compare.cluster.messages import (
    AskTime,
    Counted,
    Ended,
    Failed,
    Hello,
    Kill,
    Listen,
    Order,
    Start,
    Stop,
    Tell,
    Time,
)
from hubring.workers.compare.run.noise import Sample
from hubring.workers.compare.run.process import GRACE_SECONDS, RunProcess

_ANSWER_SECONDS = 30.0

_T = TypeVar("_T")


class Gone(HubringError):
    """A follower is lost; the message names it and how to resume."""


class Member:
    """One follower; owns its connection.

    Args:
        hello: Its first message.
        wire: Its connection.
    """

    def __init__(self, hello: Hello, wire: Wire) -> None:
        self.hello = hello
        self._wire = wire
        self._codes: dict[str, int] = {}
        self._sample: Sample | None = None
        self._time: int | None = None

    @property
    def name(self) -> str:
        """Name for people."""
        return f"rank {self.hello.rank} on {self.hello.host}"

    def order(self, order: Order) -> None:
        """Sends it an order.

        Raises:
            Gone: The follower is lost.
        """
        try:
            self._wire.send(order)
        except Lost as cause:
            raise self._gone(cause) from cause

    def start(self, order: Start) -> None:
        """Orders it to start a program; raises as `order`."""
        self._codes.pop(order.name, None)
        self.order(order)

    def code(self, name: str, timeout: float = 0.0) -> int | None:
        """Returns a program's exit code; None if it has not ended within `timeout` seconds.

        Raises:
            Gone: The follower is lost.
            HubringError: The follower reported a failure.
        """
        deadline = time.monotonic() + timeout
        while self._hear(0.0 if name in self._codes else max(0.0, deadline - time.monotonic())):
            pass
        return self._codes.get(name)

    def listen(self) -> None:
        """Orders it to measure noise; raises as `order`."""
        self._sample = None
        self.order(Listen())

    def sample(self) -> Sample:
        """Returns its noise counts since `listen`; raises as `code`."""
        self.order(Tell())
        return self._answer(lambda: self._sample)

    def clock_offset(self) -> Offset:
        """Measures how far the conductor's clock is ahead of its clock; raises as `code`."""

        def ask() -> int:
            self._time = None
            self.order(AskTime())
            return self._answer(lambda: self._time)

        found = clock_offset.measure(ask)
        return Offset(-found.ahead, found.round_trip)

    def close(self) -> None:
        """Closes the connection, which ends all that the follower runs."""
        self._wire.close()

    def _answer(self, known: Callable[[], _T | None]) -> _T:
        """Handles messages until an answer is known; raises as `code`."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (answer := known()) is None:
            if not self._hear(max(0.0, deadline - time.monotonic())):
                raise self._gone(Lost(f"no answer within {_ANSWER_SECONDS:g} s"))
        return answer

    def _hear(self, timeout: float) -> bool:
        """Handles one message; False if none arrives in time."""
        try:
            message = self._wire.receive(timeout)
        except Lost as cause:
            raise self._gone(cause) from cause
        match message:
            case None:
                return False
            case Ended(name=name, code=code):
                self._codes[name] = code
            case Counted(sample=sample):
                self._sample = sample
            case Time(ns=ns):
                self._time = ns
            case Failed(why=why):
                raise HubringError(f"{self.name}: {why}")
        return True

    def _gone(self, cause: Lost) -> Gone:
        return Gone(
            f"{self.name} is lost ({cause}) and the comparison ends. To resume without repeating finished"
            " runs, start all tasks again with the same --out"
        )


class Remote(RunProcess):
    """A program that a follower runs.

    Args:
        name: Name for people and for the output files.
        command: Program and arguments.
        directory: Folder for its output, visible to all machines.
        member: The follower that runs it.
        threads: PyTorch threads.
    """

    def __init__(
        self, name: str, command: Sequence[str], directory: Path, member: Member, threads: int
    ) -> None:
        super().__init__(name, command, directory)
        self._member = member
        place = str(directory.absolute())
        member.start(Start(name=name, command=self.command, directory=place, threads=threads))

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
