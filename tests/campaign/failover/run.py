"""One job with standbys, and its kills."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import grpc

from hubring.ps.core.errors import HubringError
from tests.campaign import states
from tests.campaign.evidence import State
from tests.campaign.failover.plan import SHARDS, Plan
from tests.campaign.job import CONSTANTS, SCRIPT
from tests.campaign.server_processes import server_processes
from tests.support.processes.cluster import Cluster
from tests.support.processes.process_tree import coordinators, ends_by, parent


class Run:
    """One job and its kills."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self._cluster, self._plan = cluster, plan
        mode = plan.kind if plan.at_hub else "bsp"
        flags = ["--workers", str(plan.workers), "--once", "--no-page"]
        if plan.kind != "ring":
            flags += ["--mode", mode, *CONSTANTS.get(mode, ()), "--shards", str(SHARDS)]
            flags += ["--slice-bytes", "4096"]
            flags += ["--checkpoint-dir", str(cluster.folder / "saved"), "--checkpoint-every", "0.3"]
        if plan.target:
            flags += ["--standby", "1"]
        self.server, self.address = cluster.server(*flags)
        self._victims: dict[str, int] = {}
        if plan.target:
            self.server.until(self._guarded, "standbys")
        topology = ["--topology", "ring"] if plan.kind == "ring" else ["--transport", plan.wire]
        topology += ["--aggregate"] * (plan.kind == "aggregate")
        self.workers = [
            cluster.worker(
                self.address,
                *(*topology, "--rank", str(rank), "--timeout", "30", SCRIPT, str(cluster.folder)),
                *(name, str(plan.workers), str(plan.steps), str(plan.pace), ""),
                name=name,
            )
            for rank, name in enumerate(plan.names)
        ]

    def _guarded(self) -> bool:
        """Whether the coordinator and each shard of a hub have a standby; notes the processes to kill."""
        served = server_processes(self._cluster, self.address)
        self._victims = {"guardian": self.server.process.pid, **served}
        shards = () if self._plan.kind == "ring" else range(SHARDS)
        standbys = {"standby of coordinator", *(f"standby of shard {number}" for number in shards)}
        return standbys <= served.keys()

    def until_the_moment(self) -> None:
        """Waits until the moment to kill. No event marks a moment while workers join, or at the end."""
        plan = self._plan
        if plan.moment == "joining":
            time.sleep(3.0 * plan.delay)
            return
        step = int(plan.delay * 50) if plan.moment == "training" else plan.steps
        self.workers[0].until(
            lambda: (
                states.progress(self._cluster.folder, plan.names[0]) >= step
                or self.workers[0].process.poll() is not None
            ),
            f"step {step}",
        )
        if plan.moment == "ending":
            time.sleep(0.3 * plan.delay)

    def kill(self) -> float:
        """Kills; returns the seconds until a coordinator answers.

        Raises:
            ProcessLookupError: The process has ended.
        """
        first = self._kill()
        if self._plan.target == "coordinator":
            return self._until_answered()
        if self._plan.twice:
            self.server.until_said("has taken its place")
            self.server.until(
                lambda: self._guarded() and self._victims[self._plan.victim] != first, "another standby"
            )
            self._kill()
        return 0.0

    def _kill(self) -> int:
        pid = self._victims[self._plan.victim]
        if not parent(pid):
            raise ProcessLookupError(f"the {self._plan.victim} has ended")
        os.kill(pid, signal.SIGKILL)
        return pid

    def _until_answered(self) -> float:
        began = time.monotonic()
        self.server.until(lambda: self._answers() or self.server.process.poll() is not None, "answer")
        return time.monotonic() - began

    def _answers(self) -> bool:
        """Whether a coordinator answers that has taken over."""
        try:
            return bool(self._cluster.status(self.address)["failovers"])
        except (grpc.RpcError, HubringError):
            return False

    def finish(self, killed: str) -> list[str]:
        """Waits for the end; returns what is wrong with exit codes and the last line."""
        faults = [
            f"{worker.name} exited with {code}: {worker.said()[-600:]}"
            for worker in self.workers
            if (code := worker.wait()) != 0
        ]
        code = self.server.wait()
        if code != (-signal.SIGKILL if killed == "guardian" else 0):
            faults.append(f"the server exited with {code}: {self.server.said()[-900:]}")
        deadline = time.monotonic() + 60.0
        if left := [pid for pid in coordinators() if not ends_by(pid, deadline)]:
            faults.append(f"{left} still run")
        found = self.result()
        if (found["finished"], found["error"]) != ([*range(self._plan.workers)], ""):
            faults.append(f"the last line is {found}")
        return faults

    def result(self) -> dict[str, Any]:
        """Returns the last line of the server."""
        lines = self.server.out.read_text().splitlines()
        last: dict[str, Any] = json.loads(lines[-1]) if lines else {"finished": [], "error": "no last line"}
        return last

    def parameters(self) -> dict[str, State]:
        """Returns what each worker ended with, and what the last checkpoint of a hub has."""
        found = states.finals(self._cluster.folder, self._plan.names)
        if self._plan.at_hub:
            saved, *_ = states.checkpoint(self._cluster.folder / "saved")
            found["the last checkpoint"] = saved or {}
        return found
