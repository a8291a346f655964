"""Simulation of workers that do not step together: asp and ssp.

Discrete events, one window of them at a time. The window is the least time that an exchange and the next step
take. No worker begins to push twice within it, so all pushes of a window are handled at once, in order, as
arrays (conservative lookahead; Chandy and Misra, IEEE TSE 1979). The result equals that of one event after
another. 10,000 workers take a hundred steps in well under a second.

Approximations: an exchange passes a server's link as a whole, in order of arrival, although slices of several
exchanges share it; that moves single exchanges but not their number. Servers' parts are equal, so all k
servers are one that is k times as fast. The first slice passes after its share of the whole time.
"""

from __future__ import annotations

import numpy as np

from hubring.workers.compare.cost.simulate.draws import Array, Draws, Ranks
from hubring.workers.compare.cost.simulate.scene import Course, Scene
from hubring.workers.compare.cost.simulate.station import Station
from hubring.workers.compare.cost.simulate.waiting import Pushes, Staleness


class Crowd:
    """All workers of one scene, and the resources that they share.

    Args:
        scene: Its rule is asp or ssp.
    """

    def __init__(self, scene: Scene) -> None:
        way = scene.way
        self._scene, self._way = scene, way
        self._own = max(way.own, way.shared, way.cores + way.closing)
        self._first = way.shared / way.slices / self._own if self._own else 0.0
        """Share of the time in a link that the first slice takes."""
        self._entry = Station(max(way.shared, way.cores + way.closing))
        self._server = Station(way.serve + way.close)
        self._exit = Station(max(way.shared, way.cores + way.closing))
        self._rule = Staleness(scene.workers, scene.staleness if scene.rule == "ssp" else None)
        self._draws = Draws(scene.straggler, scene.workers, scene.seed)
        self._everyone = np.arange(scene.workers)
        self._taken = np.zeros(scene.workers, np.intp)
        self._ready = np.full(scene.workers, scene.compute)
        self._ready += self._draws.take(self._everyone, self._taken)
        self._read = np.zeros(scene.workers, np.intp)
        self._begun = np.zeros(scene.workers)
        self._window = scene.compute + way.alone
        self._applied = self._lead = 0
        self._lost_at: float | None = None
        self._stale = 0
        self._now = 0.0
        """Time of the last applied gradient."""
        self._times: list[Array] = []

    def run(self) -> Course:
        """Runs until the workers have taken their steps, on average."""
        wanted = self._scene.workers * self._scene.steps
        while self._applied < wanted:
            self._lose()
            if self._lost_at is not None and self._ready.min() >= self._lost_at + self._scene.lease:
                self._answer(self._rule.forget(self._lost, self._lost_at + self._scene.lease))
                self._lost_at = None
                continue
            now = float(self._ready.min())
            self._step(np.flatnonzero(self._ready <= now + self._window * (1 - 1e-9)))
        return self._course()

    @property
    def _lost(self) -> int:
        assert self._scene.fault is not None
        return self._scene.fault.rank

    def _lose(self) -> None:
        """Loses a worker at the start of its step; the others notice a lease later."""
        fault = self._scene.fault
        if fault is not None and self._taken[fault.rank] == fault.step and self._ready[fault.rank] < np.inf:
            self._lost_at = float(self._begun[fault.rank])
            self._ready[fault.rank] = np.inf

    def _step(self, ranks: Ranks) -> None:
        ranks = ranks[np.argsort(self._ready[ranks], kind="stable")]
        pushes = self._push(ranks, self._ready[ranks])
        order = self._applied + np.arange(len(ranks))
        self._stale += int((order - self._read[ranks]).sum())
        self._ready[ranks] = np.inf
        answered = self._rule.apply(pushes)
        self._note_lead(answered.ranks)
        self._read[answered.ranks] = self._applied + np.searchsorted(pushes.tails, answered.tails, "right")
        self._applied += len(ranks)
        self._now = float(pushes.tails[-1])
        self._answer(answered)

    def _push(self, ranks: Ranks, arrivals: Array) -> Pushes:
        """Sends through the servers' links and processors."""
        way = self._way
        tails = np.maximum(arrivals + self._own, self._entry.take(arrivals))
        heads = arrivals + (tails - arrivals) * self._first
        each = way.serve + way.close
        served = np.maximum(self._server.take(heads), tails + each / way.slices)
        return Pushes(ranks, np.minimum(heads + each / way.slices, served), served)

    def _answer(self, pushes: Pushes) -> None:
        """Sends back through the servers' links and starts the next step."""
        way, ranks = self._way, pushes.ranks
        by_head = np.argsort(pushes.heads, kind="stable")
        left = np.empty(len(ranks))
        left[by_head] = self._exit.take(pushes.heads[by_head])
        ends = np.maximum(np.maximum(left, pushes.heads + self._own), pushes.tails + self._own * self._first)
        ends += way.latency + way.after
        self._times.append(ends - self._begun[ranks])
        self._begun[ranks] = ends
        self._taken[ranks] += 1
        self._ready[ranks] = ends + self._scene.compute + self._draws.take(ranks, self._taken[ranks])

    def _note_lead(self, ranks: Ranks) -> None:
        """Updates the lead of workers that can go on: a step is completed by its read."""
        if len(ranks):
            counts = self._rule.counts
            self._lead = max(self._lead, int(counts[ranks].max() - counts.min()))

    def _course(self) -> Course:
        times = np.concatenate(self._times)
        return Course(
            step_seconds=float(np.median(times[len(times) // 10 :])),  # once queues have formed
            steps_per_second=self._applied / self._now,
            seconds=self._now,
            exchanges=self._applied,
            busy=self._entry.busy,
            lead=self._lead,
            staleness=self._stale / self._applied,
        )
