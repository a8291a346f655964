"""Workers that do not step together, simulated: asp and ssp.

Discrete events, a window of them at a time: whoever begins to push within the least time that an exchange and
the next step take cannot be followed by itself within it, so all of these are handled at once, in
order, as arrays (conservative lookahead; Chandy and Misra, IEEE TSE 1979). The result is that of one
event after another; 10,000 workers take a hundred steps in well under a second.

What is approximated: an exchange passes a server's link as a whole, in the order of arrival, where in truth
slices of several share it; that moves single exchanges, not how many pass. Servers' parts are equal, so all k
are one, k times as fast. The first slice is through after its part of the whole's time.
"""

from __future__ import annotations

import numpy as np

from hubring.workers.compare.cost.simulate.draws import Array, Draws, Ranks
from hubring.workers.compare.cost.simulate.scene import Course, Scene
from hubring.workers.compare.cost.simulate.station import Station
from hubring.workers.compare.cost.simulate.waiting import Pushes, Staleness


class Crowd:
    """All workers of one scene, and what they share.

    Args:
        scene: Its rule is asp or ssp.
    """

    def __init__(self, scene: Scene) -> None:
        way = scene.way
        self._scene, self._way = scene, way
        self._own = max(way.own, way.shared, way.cores + way.closing)
        self._first = way.shared / way.slices / self._own if self._own else 0.0
        """Part of the time in a link that the first slice takes."""
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
        """When the last gradient was applied."""
        self._times: list[Array] = []

    def run(self) -> Course:
        """Until the workers have taken their steps, on average."""
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
        """A worker is lost when it would begin the step; the others know a lease later."""
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
        """Through the servers' links and processors."""
        way = self._way
        tails = np.maximum(arrivals + self._own, self._entry.take(arrivals))
        heads = arrivals + (tails - arrivals) * self._first
        each = way.serve + way.close
        served = np.maximum(self._server.take(heads), tails + each / way.slices)
        return Pushes(ranks, np.minimum(heads + each / way.slices, served), served)

    def _answer(self, pushes: Pushes) -> None:
        """Back through the servers' links; then the next step."""
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
        """Of those that may go on: a step is completed by its read."""
        if len(ranks):
            counts = self._rule.counts
            self._lead = max(self._lead, int(counts[ranks].max() - counts.min()))

    def _course(self) -> Course:
        times = np.concatenate(self._times)
        return Course(
            step_seconds=float(np.median(times[len(times) // 10 :])),  # after the others' queues are there
            steps_per_second=self._applied / self._now,
            seconds=self._now,
            exchanges=self._applied,
            busy=self._entry.busy,
            lead=self._lead,
            staleness=self._stale / self._applied,
        )
