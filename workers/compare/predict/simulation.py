"""Simulation of what formulas do not cover: stragglers, bounded staleness, queues and backup workers.

bsp, backup workers and the ring run in lockstep: all begin a step when the last one ended. Steps depend on
each other only through late workers, so a step is a few operations on arrays of all workers.

Without lockstep there are discrete events, one window of them at a time. The window is the least time that an
exchange and the next step take. No worker begins to push twice within it, so all pushes of a window are
handled at once, in order, as arrays (conservative lookahead; Chandy and Misra, IEEE TSE 1979). The result
equals that of one event after another. 10,000 workers take a hundred steps in well under a second.

Approximations: in lockstep, bytes are fluid, and workers that push at once share a server's link evenly. A
round's time after its last arrival depends on when the others arrived: their bytes have passed already, or
still occupy the link. Without lockstep, an exchange passes a server's link as a whole, in order of arrival,
although slices of several exchanges share it; that moves single exchanges but not their number, and the first
slice passes after its share of the whole time. Servers' parts are equal, so all k servers are one that is k
times as fast.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hubring.workers.compare.plan.row import Row
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.predict.exchange_terms import HubExchange
from hubring.workers.runtime.slowdown import SLOW_SHARE, SlowdownSettings, Straggler


class SimulationInput(Struct, frozen=True, kw_only=True):
    """Workers that compute, exchange, and wait by a rule.

    Attributes:
        row: Its rule says which workers wait for each other. `ring` and `bsp`: all for all; `backup`: all for
            all but some; `ssp`: no worker leads by more than the staleness; `asp`: no worker waits.
        setting: The number of workers, and which are slow.
        way: Load of one exchange.
        compute: Seconds a step, the same for all.
        steps: Mean steps of a worker.
        seed: Seed of all draws.
    """

    row: Row
    setting: Setting
    way: HubExchange
    compute: float = 0.0
    steps: int = 100
    seed: int = 0

    @property
    def draws(self) -> Draws:
        """Fresh draws of the workers' delays."""
        return Draws(self.setting.straggler, self.setting.workers, self.seed)


class SimulationResult(Struct, frozen=True, kw_only=True):
    """Result of a simulation.

    Attributes:
        step_seconds: Median time between two steps of a worker.
        seconds: Simulated time.
        exchanges: Number of exchanges of all workers, also of gradients that came too late for their round.
    """

    step_seconds: float
    seconds: float
    exchanges: int


Array = NDArray[np.float64]
Ranks = NDArray[np.intp]

EXACT_WORKERS = 16
"""Up to so many workers have the very delays of an experiment's runs with that seed; these draws are slow."""

_HOST_STEPS = 4000
"""Steps after which a slow host's draws repeat."""


class Draws:
    """Extra seconds of the experiment's delays: the same numbers for few workers, else their distribution.

    Args:
        straggler: The slow workers; None: none.
        workers: Number of workers.
        seed: The same seed gives the same draws in the same order.
    """

    def __init__(self, straggler: Straggler | None, workers: int, seed: int) -> None:
        self._straggler = straggler
        self._random = np.random.default_rng(seed)
        self._slow = np.zeros(workers, bool)
        if straggler is not None:
            self._slow[list(straggler.ranks) or slice(None)] = True
        slowness, few = SlowdownSettings(straggler, seed=seed), workers <= EXACT_WORKERS
        self._exact = slowness if few and straggler else None
        self._host_is_slow = self._random.random(_HOST_STEPS) < SLOW_SHARE

    def take(self, ranks: Ranks, steps: Ranks) -> Array:
        """Returns the extra seconds of each of these ranks in its own step.

        Args:
            ranks: Ranks, [n].
            steps: Completed steps of each, [n].
        """
        straggler, slow = self._straggler, self._slow[ranks]
        extra = np.zeros(len(ranks))
        if self._exact:
            pairs = zip(ranks, steps, strict=True)
            return np.array([self._exact.lateness(int(rank), int(step)) for rank, step in pairs], float)
        if straggler is None or not slow.any():
            return extra
        if straggler.kind == "constant":
            extra[slow] = straggler.seconds
        elif straggler.kind == "host":
            extra[slow] = self._host_is_slow[steps[slow] % _HOST_STEPS] * straggler.seconds / SLOW_SHARE
        else:  # Lomax: a Pareto distribution that starts at 0, with mean scale / (shape - 1)
            drawn = self._random.pareto(straggler.shape, int(slow.sum()))
            extra[slow] = straggler.seconds * (straggler.shape - 1) * drawn
        return extra


def all_for_all(scene: SimulationInput) -> SimulationResult:
    """Simulates bsp and a ring: a step ends when the last gradient has arrived and is answered."""
    draws, ranks = scene.draws, np.arange(scene.setting.workers)
    seconds = np.zeros(scene.steps)
    for step in range(scene.steps):
        arrivals = np.sort(scene.compute + draws.take(ranks, np.full(len(ranks), step)))
        # Of a ring, all 2(n-1) hops follow.
        rest = after_last(scene.way, arrivals) if scene.row.rule == "bsp" else scene.way.alone
        seconds[step] = arrivals[-1] + rest
    return _course(seconds, scene.steps * scene.setting.workers)


def all_but_some(scene: SimulationInput) -> SimulationResult:
    """Simulates backup workers (Chen et al. 2016): a round takes the first n - b gradients of its parameters.

    A later gradient is dropped on arrival; its worker continues with the open round. A read belongs to the
    last round that closed before it.
    """
    workers, draws = scene.setting.workers, scene.draws
    ranks, needed, seconds, exchanges = np.arange(workers), workers - scene.row.backup, [], 0
    taken = np.zeros(workers, np.intp)
    read = np.zeros(workers)
    ready = read + scene.compute + draws.take(ranks, taken)
    closed = 0.0
    for _ in range(scene.steps):
        fresh = np.sort(ready)[:needed]
        last = float(fresh[-1])
        end = last + after_last(scene.way, fresh)
        late = (read <= last) & (ready > last)
        timely = ready <= last
        # A late gradient is pushed, dropped, and answered.
        read = np.where(timely, end, np.where(late, ready + scene.way.alone, read))
        moved = timely | late
        taken[moved] += 1
        ready[moved] = read[moved] + scene.compute + draws.take(ranks[moved], taken[moved])
        seconds.append(end - closed)
        closed = end
        exchanges += int(moved.sum())
    return _course(np.array(seconds), exchanges)


def after_last(way: HubExchange, arrivals: Array) -> float:
    """Returns seconds from the last arrival until all have answers; `way.lockstep` if all arrive at once.

    Args:
        way: Load of each exchange.
        arrivals: When each begins to push, ascending.
    """
    workers, last = len(arrivals), arrivals[-1]
    behind = np.arange(workers, 0, -1)  # exchanges that the busy time still has to cover
    entering = max(way.own, float((arrivals + behind * way.shared).max() - last))
    serving = float((arrivals + behind * way.serve).max() - last) + way.close
    working = float((arrivals + behind * way.cores).max() - last) + way.closing
    passing = way.through(entering, serving, working, workers)
    return passing + way.latency + way.sway(workers) + way.after


def _course(seconds: Array, exchanges: int) -> SimulationResult:
    """Returns the course of steps with these lengths."""
    return SimulationResult(
        step_seconds=float(np.median(seconds)), seconds=float(seconds.sum()), exchanges=exchanges
    )


class ServiceQueue:
    """First come, first served (Lindley's recursion, 1952), for many arrivals at once.

    Args:
        each: Seconds of one exchange.
    """

    def __init__(self, each: float) -> None:
        self._each = each
        self._free = 0.0

    def take(self, arrivals: Array) -> Array:
        """Returns when each exchange is done.

        Args:
            arrivals: Ascending, and not before those of an earlier call.
        """
        done_before = np.arange(len(arrivals)) * self._each
        # The station works without a pause since the arrival that maximises this.
        began = np.maximum.accumulate(np.maximum(arrivals, self._free) - done_before)
        ends: Array = began + done_before + self._each
        if len(ends):
            self._free = float(ends[-1])
        return ends


class Pushes(NamedTuple):
    """Applied gradients.

    Attributes:
        ranks: Ranks, [n].
        heads: When each gradient's first slice was applied, s.
        tails: When each gradient's last slice was applied, s.
    """

    ranks: Ranks
    heads: Array
    tails: Array

    def where(self, chosen: NDArray[np.bool_]) -> Pushes:
        return Pushes(self.ranks[chosen], self.heads[chosen], self.tails[chosen])


class Staleness:
    """SSP's rule (Ho et al., NIPS 2013): a worker that pushed c gradients reads once all have pushed c - s.

    s = 0 is bsp's bound; None is asp, where no worker waits.

    Args:
        workers: Number of workers.
        bound: The s.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self.counts = np.zeros(workers, np.intp)
        """Applied gradients by worker."""
        self._bound = bound
        self._slowest = 0
        self._held = np.zeros(workers, bool)
        self._heads, self._tails = np.zeros(workers), np.zeros(workers)

    def apply(self, pushes: Pushes) -> Pushes:
        """Counts pushes, at most one per worker; returns those that can be answered, with earlier ones."""
        self.counts[pushes.ranks] += 1
        if self._bound is None:
            return pushes
        self._heads[pushes.ranks], self._tails[pushes.ranks] = pushes.heads, pushes.tails
        self._held[pushes.ranks] = True
        free = pushes.where(self.counts[pushes.ranks] - self._bound <= self._slowest)
        self._held[free.ranks] = False
        return Pushes(*(np.concatenate(pair) for pair in zip(free, self._advance(pushes), strict=True)))

    def _advance(self, pushes: Pushes) -> Pushes:
        """Returns the pushes that can be answered because the slowest worker has pushed."""
        were_slowest = self.counts[pushes.ranks] == self._slowest + 1
        if self.counts.min() == self._slowest or not were_slowest.any():
            return pushes.where(np.zeros(len(pushes.ranks), bool))
        last = np.flatnonzero(were_slowest)[np.argmax(pushes.tails[were_slowest])]
        self._slowest = int(self.counts.min())
        ranks = np.flatnonzero(self._held & (self.counts - (self._bound or 0) <= self._slowest))
        self._held[ranks] = False
        heads, tails = self._heads[ranks], self._tails[ranks]
        head, tail = pushes.heads[last], pushes.tails[last]
        # None is answered earlier than the last one.
        return Pushes(ranks, np.where(tails < tail, np.maximum(heads, head), heads), np.maximum(tails, tail))


class AsynchronousWorkers:
    """All workers of one scene, and the resources that they share.

    Args:
        scene: Its rule is asp or ssp.
    """

    def __init__(self, scene: SimulationInput) -> None:
        way, workers = scene.way, scene.setting.workers
        self._scene, self._way = scene, way
        self._own = max(way.own, way.shared, way.cores + way.closing)
        self._first = way.shared / way.slices / self._own if self._own else 0.0
        """Share of the time in a link that the first slice takes."""
        self._entry = ServiceQueue(max(way.shared, way.cores + way.closing))
        self._server = ServiceQueue(way.serve + way.close)
        self._exit = ServiceQueue(max(way.shared, way.cores + way.closing))
        self._rule = Staleness(workers, scene.row.staleness if scene.row.rule == "ssp" else None)
        self._draws = scene.draws
        self._taken = np.zeros(workers, np.intp)
        self._ready = scene.compute + self._draws.take(np.arange(workers), self._taken)
        self._begun = np.zeros(workers)
        self._window = scene.compute + way.alone
        self._applied = 0
        self._now = 0.0
        """Time of the last applied gradient."""
        self._times: list[Array] = []

    def run(self) -> SimulationResult:
        """Runs until the workers have taken their steps, on average."""
        wanted = self._scene.setting.workers * self._scene.steps
        while self._applied < wanted:
            now = float(self._ready.min())
            self._step(np.flatnonzero(self._ready <= now + self._window * (1 - 1e-9)))
        times = np.concatenate(self._times)
        return SimulationResult(
            step_seconds=float(np.median(times[len(times) // 10 :])),  # once queues have formed
            seconds=self._now,
            exchanges=self._applied,
        )

    def _step(self, ranks: Ranks) -> None:
        ranks = ranks[np.argsort(self._ready[ranks], kind="stable")]
        pushes = self._push(ranks, self._ready[ranks])
        self._ready[ranks] = np.inf
        answered = self._rule.apply(pushes)
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


def simulate(scene: SimulationInput) -> SimulationResult:
    """Simulates a scene; the same scene has the same result.

    With equal workers it agrees with the formulas: exactly in lockstep, else in the long run.
    """
    if scene.row.rule == "backup":
        return all_but_some(scene)
    if scene.row.rule in ("ssp", "asp"):
        return AsynchronousWorkers(scene).run()
    return all_for_all(scene)
