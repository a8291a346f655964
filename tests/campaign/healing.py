"""Kills members of one ring again and again: python -m tests.campaign.healing --kills 100.

Each kill hits a random member at a random moment, and a new worker takes its place. At the end the ledger of
samples must show each sample of each epoch once, and all members must have the same parameters.

The first half of the kills hits any member. The second half spares the newest one. It lives through all their
generations, and must hold no more at the end than at the begin, however many there are.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec.structs import fields
from safetensors.torch import load_file

from tests.campaign.resources import Held, growth, held
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.process_tree import take_in_orphans

SCRIPT = str(Path(__file__).with_name("healing_script.py"))
MEMBERS, LEAST = 3, 2
SAMPLES, BATCH = 240, 4
WARM = 2
"""Kills beside the spared member before it is measured: libraries start threads lazily."""
FEWEST = 20
"""Kills with which a leak in each generation is more than `growth` allows."""
SOON = 0.3
"""Seconds after a kill within which its pause begins: a step that has all its gradients still ends."""


@dataclass
class Run:
    """One run.

    Attributes:
        cluster: Starts the programs.
        kills: How many members to kill.
        chance: Chooses victims and moments.
        moments: When members were killed, in seconds since 1970.
        spared: The member that is not killed any more, in the second half.
        measured: What it held after `WARM` kills beside it, and at the end.
    """

    cluster: Cluster
    kills: int
    chance: random.Random
    moments: list[float] = field(default_factory=list)
    spared: Program | None = None
    measured: list[Held] = field(default_factory=list)
    _started: int = 0

    @property
    def _folder(self) -> Path:
        return self.cluster.folder

    def play(self) -> tuple[Program, list[Program]]:
        """Returns the server and the members of the end."""
        server, address = self.cluster.server("--workers", str(MEMBERS), "--once")
        members = [self._member(address, rank) for rank in range(MEMBERS)]
        newest = members[-1]
        while len(self.moments) < self.kills:
            self._await_all(members)
            if len(self.moments) == self.kills // 2:
                self.spared = newest
            if len(self.moments) == self.kills // 2 + WARM:
                self._measure()
            time.sleep(self.chance.uniform(0.0, 0.3))
            place = self.chance.choice([at for at in range(MEMBERS) if members[at] is not self.spared])
            members[place].process.send_signal(signal.SIGKILL)
            self.moments.append(time.time())
            members[place].process.wait()
            newest = members[place] = self._member(address, None)
            print(f"kill {len(self.moments)}", flush=True)
        self._await_all(members)
        self._measure()
        (self._folder / "stop").touch()
        return server, members

    def _await_all(self, members: list[Program]) -> None:
        for member in members:
            member.until(partial(self._trains, member), "a step with all members")

    def _measure(self) -> None:
        assert self.spared is not None
        found = held(self.spared.process.pid)
        assert found is not None, f"{self.spared.name} has ended:\n{self.spared.said()}"
        self.measured.append(found)

    def leaks(self) -> list[str]:
        """Returns what the spared member holds more of than it may, after any number of kills."""
        assert self.spared is not None
        beside = self.kills - self.kills // 2 - WARM
        return [f"{beside} kills beside {self.spared.name}: {more}" for more in growth(*self.measured)]

    def _member(self, address: str, rank: int | None) -> Program:
        self._started += 1
        name = f"member{self._started}"
        place = [] if rank is None else ["--rank", str(rank)]
        flags = ["--topology", "ring", "--min-workers", str(LEAST), *place]
        flags += ["--save-parameters", str(self._folder / "final.safetensors"), "--timeout", "60"]
        words = [str(self._folder / "stop"), str(self._folder / f"{name}.trail"), str(SAMPLES), str(BATCH)]
        return self.cluster.worker(address, *flags, SCRIPT, *words, name=name)

    def _trains(self, member: Program) -> bool:
        """Whether its last step had all members."""
        lines = self.trail(member.name)
        return bool(lines) and lines[-1][1] == MEMBERS

    def trail(self, name: str) -> list[tuple[int, int, float]]:
        """Returns step, members and time of each step of a member."""
        path = self._folder / f"{name}.trail"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line.split() for line in lines if line.count(" ") == 2]
        return [(int(step), int(size), float(when)) for step, size, when in found]

    def pauses(self) -> list[float]:
        """Returns the longest time between two steps of a survivor soon after each kill, in seconds."""
        gaps = self._gaps()
        return [
            max((end - begin for begin, end in gaps if begin < moment + SOON and end > moment), default=0.0)
            for moment in self.moments
        ]

    def step_seconds(self) -> float:
        """Returns the median time of a step."""
        return median(end - begin for begin, end in self._gaps())

    def _gaps(self) -> list[tuple[float, float]]:
        """Returns the times between which each member was in a step."""
        trails = [self.trail(f"member{number}") for number in range(1, self._started + 1)]
        return [(earlier[2], later[2]) for lines in trails for earlier, later in pairwise(lines)]


def violations(folder: Path, epochs: int) -> list[str]:
    """Returns what is wrong with the ledger."""
    ledger = load_file(folder / "final.safetensors")["ledger"][:epochs]
    shares = [1 / size for size in range(LEAST, MEMBERS + 1)]
    found = []
    for epoch, row in enumerate(ledger.tolist()):
        wrong = [value for value in row if value and min(abs(value - share) for share in shares) > 1e-3]
        if wrong:
            found.append(f"epoch {epoch}: {len(wrong)} sample(s) were trained on more than once: {wrong[:5]}")
        missing = sum(value == 0 for value in row)
        if missing >= MEMBERS:
            found.append(f"epoch {epoch}: {missing} samples were not trained on")
    return found


def report(run: Run) -> str:
    """Returns a table of the pauses."""
    pauses, step = sorted(run.pauses()), run.step_seconds()
    rows = {
        "median": pauses[len(pauses) // 2],
        "95th": pauses[int(0.95 * (len(pauses) - 1))],
        "longest": pauses[-1],
    }
    lines = [
        f"{len(pauses)} kills, {1000 * step:.0f} ms a step",
        "| pause | s | steps |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {name} | {value:.2f} | {value / step:.1f} |" for name, value in rows.items()]
    late = sum(pause > step + 2 for pause in pauses)
    lines += [f"longer than a step and 2 s: {late}", "", "| the spared member | early | late |"]
    early, last = run.measured
    held_ = [(one.name, getattr(early, one.name), getattr(last, one.name)) for one in fields(Held)]
    return "\n".join([*lines, "| --- | --- | --- |", *(f"| {name} | {a} | {b} |" for name, a, b in held_)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.healing")
    parser.add_argument("--kills", type=int, default=100, help="members to kill")
    parser.add_argument("--seed", type=int, default=1, help="chooses victims and moments")
    arguments = parser.parse_args()
    if arguments.kills < FEWEST:
        parser.error(f"--kills {arguments.kills}: pass {FEWEST} or more")
    take_in_orphans()
    os.environ["MALLOC_ARENA_MAX"] = "1"  # what freed memory leaves in the arenas of ended threads is no leak
    with tempfile.TemporaryDirectory() as folder, ForkServer() as fork_server:
        cluster = Cluster(Path(folder), fork_server)
        try:
            run = Run(cluster, arguments.kills, random.Random(arguments.seed))
            server, members = run.play()
            results = [member.done() for member in members]
            server.done()
            digests = Counter(result["metrics"]["digest"] for result in results)
            found = violations(Path(folder), int(results[0]["metrics"]["epochs"]))
            found += run.leaks()
            if len(digests) > 1:
                found.append(f"the members have different parameters: {dict(digests)}")
            print(report(run), *found, sep="\n")
        except BaseException:
            cluster.end()
            raise
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
