"""The programs of one job: a server with its shards, and the workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hubring.ps.security.token_file import runtime_file
from tests.campaign.processes import Ports, listening, ports, server_processes
from tests.campaign.scenario import LAST_HOLD, LEASE, STEPS, TIMEOUT, Scenario
from tests.campaign.states import progress
from tests.campaign.tampering import Relay
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.process_tree import coordinators
from tests.support.processes.stopwatch import Stopwatch

SCRIPT = str(Path(__file__).with_name("script.py"))
LOOK_SECONDS = 0.02
LIMIT = 60.0
"""Seconds of a run, by a stopwatch."""
CONSTANTS = {"ssp": ("--staleness", "1"), "backup": ("--backup", "1")}


def port_of(address: str) -> int:
    """Returns the port of `HOST:PORT`."""
    return int(address.rpartition(":")[2])


class Job:
    """One job.

    Args:
        cluster: Starts the programs.
        scenario: Its mode, wire and sizes.
        saved: The folder for checkpoints.
        act: Distinguishes the names of its programs from those of another job.
        watch: Counts the seconds of the whole run.
    """

    def __init__(self, cluster: Cluster, scenario: Scenario, saved: Path, act: int, watch: Stopwatch) -> None:
        self.scenario = scenario
        self.folder = cluster.folder
        self.saved = saved
        self.act = act
        self.workers: dict[str, Program] = {}
        self.late: set[str] = set()
        self._cluster = cluster
        self._watch = watch
        self._relays: list[Relay] = []
        self._ports: dict[int, int] = {}
        """The port of the relay in front of each port of the shards."""
        flags = ["--workers", str(scenario.workers), "--once", "--lease", str(LEASE)]
        if scenario.place != "ports":
            flags.append("--no-page")
        if not scenario.ring:
            mode = scenario.mode if scenario.at_hub else "bsp"
            flags += ["--mode", mode, *CONSTANTS.get(mode, ())]
            flags += ["--shards", str(scenario.shards), "--slice-bytes", "4096"]
            flags += ["--checkpoint-dir", str(saved), "--checkpoint-every", "0.2"]
        if scenario.standby:
            flags += ["--standby", "1"]
        if scenario.starts:
            flags += ["--on-loss", "wait"]
        self.server, self.address = cluster.server(*flags, name=f"server-{act}")
        if scenario.standby:
            self.processes()  # they take some seconds to start, which no worker's timeout needs to cover

    def start(self, rank: int, *holds: str, address: str = "", late: bool = False) -> None:
        """Starts a worker; `holds` are arguments of the script."""
        name = f"rank-{rank}-{self.act}" + ("-again" if late else "")
        flags = ["--rank", str(rank), "--timeout", str(TIMEOUT)]
        flags += ["--token-file", str(runtime_file(port_of(self.address)))]  # a relay has another port
        if self.scenario.ring:
            flags += ["--topology", "ring", "--backend", self.scenario.wire]
            flags += ["--checkpoint-dir", str(self.saved), "--checkpoint-every", "0.2"]
        else:
            wire = self.scenario.wire + ("-tcp" if address and self.scenario.wire != "shm" else "")
            flags += ["--transport", wire, *["--aggregate"] * (not self.scenario.at_hub)]
        script = [str(self.folder), name, str(self.scenario.workers), str(STEPS), str(self.scenario.pace)]
        ports = self._ports if address else {}
        script.append(",".join(f"{port}={relay}" for port, relay in ports.items()))
        self.workers[name] = self._cluster.worker(
            address or self.address, *flags, SCRIPT, *script, *holds, name=name
        )
        if late:
            self.late.add(name)

    def relays(self) -> dict[str, list[Relay]]:
        """Starts relays in front of the server and the shards for one worker; returns them by place.

        The first relay of `control` is the address for the worker. Its script takes the relays of the shards
        in place of the ports that it learns from the server, since no relay can change an encrypted answer.
        """
        processes = self.processes()
        shards = [processes[f"shard {number}"] for number in range(self.scenario.shards)]
        data = {port: Relay(port) for pid in shards for port in listening(pid)}
        control = Relay(port_of(self.address))
        self._ports = {port: relay.port for port, relay in data.items()}
        self._relays += [*data.values(), control]
        return {"data": [*data.values()], "control": [control]}

    def processes(self) -> dict[str, int]:
        """Returns the process ids of programs, coordinator, shards and standbys, once all are there."""
        found = {name: program.process.pid for name, program in self.workers.items()}
        found |= {self.server.name: self.server.process.pid, "coordinator": self.server.process.pid}
        of_server = self.scenario.shards * (1 + self.scenario.standby)  # 0 in a ring, whose server has one

        def complete() -> bool:
            served = server_processes(self._cluster, self.address)
            found.update(served)
            shards = sum("shard" in name for name in served)
            return shards >= of_server and ("standby of coordinator" in found) == self.scenario.standby

        self.wait(complete, "shards and standbys")
        return found

    def ports(self) -> Ports:
        """Returns where the processes of the server listen."""
        processes = self.processes()
        shards = [pid for name, pid in processes.items() if "shard" in name]
        return ports(port_of(self.address), processes["coordinator"], shards)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = LIMIT) -> None:
        """Waits for a condition.

        Raises:
            TimeoutError: It is still false after so many seconds, or after LIMIT seconds of the run.
        """
        if not self.within(condition, seconds):
            raise TimeoutError(f"no {what} within {seconds:g} s")

    def within(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition, at most so many seconds and until the run's limit; returns it."""
        began = looked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now - looked > 0.5:
                if self._watch.seconds > LIMIT or now - began > 2 * seconds:
                    return False
                looked = now
            if now - began > seconds and seconds < LIMIT:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def ended(self, name: str) -> bool:
        return self.workers[name].process.poll() is not None

    def joined(self, name: str) -> bool:
        """Whether the server has admitted a worker."""
        return f"pid {self.workers[name].process.pid}) joined" in self.server.said()

    def progress(self, name: str) -> int:
        """Returns the number of steps of a worker."""
        return progress(self.folder, name)

    def holds(self, name: str, step: int) -> bool:
        return (self.folder / f"held-{step}-{name}").exists()

    def go(self, step: int) -> None:
        (self.folder / f"go-{step}").touch()

    def settle(self) -> None:
        """Waits until each worker holds before the last steps, or has ended."""
        self.within(lambda: self.all_but_stuck(lambda name: self.holds(name, LAST_HOLD)), LIMIT)

    def all_but_stuck(self, holds: Callable[[str], bool]) -> bool:
        """Whether all workers that run hold.

        With backup workers a round needs the gradients of all but one. So one of them, which is behind, can
        wait for the others while they hold.
        """
        running = [name for name in self.workers if not self.ended(name)]
        stuck = 1 if self.scenario.mode == "backup" and len(running) > 1 else 0
        return sum(holds(name) for name in running) >= len(running) - stuck

    def finish(self, seconds: float = LIMIT) -> list[str]:
        """Waits for the end of all programs; kills the rest and returns their names."""
        programs = [self.server, *self.workers.values()]

        def over() -> bool:
            return all(program.process.poll() is not None for program in programs) and not coordinators()

        self.within(over, seconds)
        left = [program for program in programs if program.process.poll() is None]
        for program in left:
            program.process.send_signal(signal.SIGCONT)
            program.process.kill()
            program.process.wait()
        for relay in self._relays:
            relay.close()
        return [program.name for program in left]

    @property
    def forwarded(self) -> int:
        return sum(relay.forwarded for relay in self._relays)


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
