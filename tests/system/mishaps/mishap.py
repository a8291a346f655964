"""One mishap: what goes wrong, which program prints what, and its exit code."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hubring.ps.core.errors import ConfigError
from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.processes.stopwatch import Stopwatch

LOOK_SECONDS = 0.1
SOON = 15.0
"""Seconds, by a stopwatch, from the mishap to the message."""

HOLD = 20
"""The step at which workers hold until the mischief is done; they take three times as many."""


class Says(NamedTuple):
    """Patterns that one line of a log matches: who is at fault, why, what to do, and since when."""

    who: str
    why: str
    fix: str
    since: str = ""


@dataclass(frozen=True)
class Mishap:
    """What goes wrong, and what is said of it.

    Attributes:
        name: What goes wrong.
        program: The program that must print the message.
        says: What identifies the message. `deploy/MISHAPS.md` has it word for word.
        provoke: Makes it happen, and returns the program.
        code: The program's exit code; 0 if it continues and finishes. Most are mistakes of configuration.
    """

    name: str
    program: str
    says: Says
    provoke: Callable[[Stage], Program]
    code: int = ConfigError.exit_code

    def but(self, name: str, provoke: Callable[[Stage], Program], **changes: Any) -> Mishap:
        """Returns another mishap, of which the program prints the same but for the changes."""
        others = {each: changes.pop(each) for each in ("program", "code") if each in changes}
        return replace(self, name=name, provoke=provoke, says=self.says._replace(**changes), **others)

    def message(self, said: str) -> str:
        """The first line that says it all; empty if none does."""
        lines = said.splitlines()
        return next((line for line in lines if all(re.search(one, line) for one in self.says)), "")


class Stage:
    """Where one mishap is provoked: programs, their folder, and the watch that runs from the moment on."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder
        self.go = cluster.go
        self.afterwards: Callable[[], object] = lambda: None
        """Lets the program finish after it printed the message."""
        self.kept = ExitStack()
        """What must stay open until then."""
        self._watch: Stopwatch | None = None

    def happens(self) -> None:
        """From now on the seconds count."""
        self._watch = Stopwatch()

    def at_once(self, told: Program) -> Program:
        """It has happened; workers that hold go on, and this program must tell of it."""
        self.happens()
        self.go.touch()
        return told

    def play(self, mishap: Mishap) -> str:
        """Provokes it, waits for the message and the end, and returns the message.

        Raises:
            AssertionError: It was not told, too late, or the program ended with another code.
        """
        with self.kept:
            program = mishap.provoke(self)
            assert self._watch is not None, f"{mishap.name}: nothing happened"
            ended = False
            while not mishap.message(program.said()):
                assert not ended, f"{program.name} ended without a message like {mishap}:\n{program.said()}"
                ended = program.process.poll() is not None
                # Looked at often: it knows of a thread that waited for a core only from the first look on.
                seconds = self._watch.seconds
                assert seconds < SOON, f"nothing like {mishap} after {seconds:.1f} s:\n{program.said()}"
                time.sleep(LOOK_SECONDS)
            self.afterwards()
            program.done(mishap.code)
            message = mishap.message(program.said())
            assert repeated(message, program.said()) == "", program.said()
            return message

    def worker(self, *words: str, **settings: Any) -> Program:
        """A worker that goes wrong from the start: the seconds count at once."""
        self.happens()
        return self.cluster.run("worker", "hubring.workers.programs.ps_worker", *words, **settings)

    def newcomer(self, flags: Sequence[str], *words: str, **settings: Any) -> Program:
        """A worker that goes wrong at a server with these flags."""
        _, address = self.cluster.server(*flags)
        return self.worker("--server", address, *words, **settings)

    def seeker(self, address: str) -> Program:
        """A worker that looks for a server; the seconds count once it does, however long torch took."""
        record = self.folder / "record"
        words = ("--record", str(record), SMALL, "5")
        seeker = self.cluster.run("worker", "hubring.workers.programs.ps_worker", "--server", address, *words)
        seeker.until(record.exists, "record")  # the last thing that is made before
        self.happens()
        return seeker

    def command(self, *words: str, **settings: Any) -> Program:
        """A call of `ps-server` that goes wrong from the start."""
        self.happens()
        return self.cluster.run("failing", "hubring.ps.cli", *words, **settings)

    def server(self, *words: str, **settings: Any) -> Program:
        """A server that goes wrong from the start."""
        return self.command("start", "--port", "0", *words, **settings)

    def hold(self, address: str, count: int, *flags: str) -> list[Program]:
        """Workers that wait at a step until `go` is there."""
        return self.cluster.held(address, *flags, count=count, steps=3 * HOLD, at=HOLD)

    def run(self, address: str) -> Program:
        """A worker that trains on and on, some steps into it."""
        record = self.folder / "record"
        worker = self.cluster.worker(address, "--record", str(record), SMALL, "1000000")
        worker.until(lambda: record.exists() and record.read_bytes().count(b"\n") > HOLD, "steps")
        return worker


def repeated(message: str, said: str) -> str:
    """Returns what standard error shows twice: the message or the script's line in it; empty if nothing."""
    text = re.sub(r"^(ps-\w+: |.* \| (WARNING: |ERROR: )?)", "", message)
    places = re.findall(r"\(\w+\.py line \d+\)", text)
    twice = [place for place in places if places.count(place) > 1]
    bare = re.sub(r" \(\w+\.py line \d+\)$", "", text)
    return next(iter(twice), bare if said.count(bare) > 1 else "")


def like_anybody() -> list[str]:
    """What runs a command for which the rights of files hold, as they do not for root."""
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
