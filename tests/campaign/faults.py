"""Makes the fault of a scenario happen, and ends it where it has an end."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.campaign.garbage import Attack
from tests.campaign.job import Job, send
from tests.campaign.scenario import LEASE, STOPPED_SECONDS, Scenario
from tests.campaign.states import damage
from tests.campaign.tampering import Relay, Tampering

SIGNAL = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "freeze": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
}
WORKER_FROZEN_SECONDS = 2 * LEASE
ROUNDS = 5
"""Rounds of garbage."""
FULL_DISK_SECONDS = 5.0
HEARTBEAT_SECONDS = 5.0
"""Longer than the pause between two heartbeats."""


class Fault:
    """The fault of one scenario, on the programs of one job.

    Args:
        scenario: Which fault.
        job: The job that it disturbs.
        relays: The relays of the victim, by place.
    """

    def __init__(self, scenario: Scenario, job: Job, relays: Mapping[str, Sequence[Relay]]) -> None:
        self._happened = False
        self.paused = 0.0
        """Seconds for which a process was stopped."""
        self._scenario = scenario
        self._job = job
        self._relays = relays.get(scenario.place, ())
        self._draw = random.Random(scenario.seed + 1)
        self._tampering = Tampering(
            scenario.fault, scenario.toward, scenario.smallest, random.Random(scenario.seed)
        )
        self._pid = 0
        self._ballast = job.saved / "ballast"

    @property
    def fired(self) -> bool:
        """Whether it happened."""
        return self._happened or self._tampering.fired.is_set()

    def happen(self, processes: Mapping[str, int]) -> None:
        """Lets it happen to one of these processes, or to the connections or the disk of the job."""
        scenario = self._scenario
        if scenario.fault == "none":
            self._happened = True
        elif scenario.fault == "garbage":
            attack = Attack(self._job.ports(), self._draw)
            attack.run(ROUNDS)
            self._happened = attack.sent > 0
        elif scenario.fault == "cut":
            self._happened = sum(relay.cut() for relay in self._relays) > 0
        elif scenario.place in ("data", "control"):
            for relay in self._relays:
                relay.arm(self._tampering, scenario.seconds)
        elif scenario.fault == "full disk":
            _fill(self._ballast)
        elif scenario.place == "disk":
            send(self._job.server.process.pid, signal.SIGKILL)
        else:
            self._pid = processes[scenario.target]
            send(self._pid, SIGNAL[scenario.fault])
            if scenario.also:
                send(processes[scenario.also], signal.SIGKILL)
            self._happened = True

    def pass_by(self) -> None:
        """Waits until a stopped process continues; others go on at once."""
        if self._scenario.fault in STOPPED_SECONDS:
            self.paused = STOPPED_SECONDS[self._scenario.fault]
            if self._scenario.fault == "freeze" and self._scenario.place in ("worker", "member"):
                self.paused = WORKER_FROZEN_SECONDS
            time.sleep(self.paused)
            send(self._pid, signal.SIGCONT)

    def end(self) -> None:
        """Once the workers settled: waits for a heartbeat that it changes; a full disk gets room again."""
        if self._scenario.place == "control":
            self._job.within(lambda: self.fired, HEARTBEAT_SECONDS)
        elif self._scenario.fault == "full disk":
            full = "No space left on device"
            self._happened = self._job.within(lambda: full in self._job.server.said(), FULL_DISK_SECONDS)
            self._ballast.unlink()

    def damage(self) -> None:
        """Damages the newest checkpoint, once its job has ended."""
        if self._scenario.damages:
            self._happened = damage(self._job.saved, self._scenario.fault, self._draw) is not None


def _fill(ballast: Path) -> None:
    """Writes until the disk is full."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return
