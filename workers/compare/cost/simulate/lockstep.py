"""Simulation of lockstep: bsp, backup workers, the ring. All begin a step when the last one ended.

Steps depend on each other only through late workers, so a step is a few operations on arrays of all workers:
10,000 workers take milliseconds.

Approximations: bytes are fluid. Workers that push at once share a server's link evenly, and servers' parts
are equal, so all k servers are one that is k times as fast. A round's time after its last arrival depends
on when the others arrived: their bytes have passed already, or still occupy the link.
"""

from __future__ import annotations

import numpy as np

from hubring.workers.compare.cost.model.exchange_terms import Way
from hubring.workers.compare.cost.simulate.draws import Array, Draws
from hubring.workers.compare.cost.simulate.scene import Course, Scene


def around_the_ring(scene: Scene) -> Course:
    """Simulates a ring: after the last worker arrives, all 2(n-1) hops follow.

    A lost worker ends the job, as it does with Hubring's ring.
    """
    draws, ranks = Draws(scene.straggler, scene.workers, scene.seed), np.arange(scene.workers)
    steps = scene.steps if scene.fault is None else min(scene.steps, scene.fault.step)
    exchange = scene.way.lockstep(1)
    slowest = [float(draws.take(ranks, np.full(scene.workers, step)).max()) for step in range(steps)]
    return _course(scene, scene.compute + exchange + np.array(slowest), finished=steps == scene.steps)


def all_for_all(scene: Scene) -> Course:
    """Simulates bsp: every step ends when the slowest worker's gradient has arrived and is answered."""
    draws, ranks = Draws(scene.straggler, scene.workers, scene.seed), np.arange(scene.workers)
    seconds, exchanges = np.zeros(scene.steps), 0
    for step in range(scene.steps):
        if scene.fault is not None and step == scene.fault.step:
            ranks = np.delete(ranks, scene.fault.rank)
            seconds[step] = scene.lease
        arrivals = np.sort(scene.compute + draws.take(ranks, np.full(len(ranks), step)))
        seconds[step] += arrivals[-1] + after_last(scene.way, arrivals)
        exchanges += len(ranks)
    return _course(scene, seconds, exchanges=exchanges)


def all_but_some(scene: Scene) -> Course:
    """Simulates backup workers (Chen et al. 2016): a round takes the first n - b gradients of its parameters.

    A later gradient is dropped on arrival; its worker continues with the open round. A read belongs to the
    last round that closed before it.
    """
    draws, ranks = Draws(scene.straggler, scene.workers, scene.seed), np.arange(scene.workers)
    needed, seconds, dropped, exchanges = scene.workers - scene.backup, [], 0, 0
    taken = np.zeros(scene.workers, np.intp)
    read = np.zeros(scene.workers)
    ready = read + scene.compute + draws.take(ranks, taken)
    closed = 0.0
    for step in range(scene.steps):
        if scene.fault is not None and step == scene.fault.step:
            ready[scene.fault.rank] = read[scene.fault.rank] = np.inf
        fresh = np.sort(ready)[:needed]
        if not np.isfinite(fresh[-1]):  # no backup worker is left for the lost one
            needed -= 1
            fresh = fresh[:-1]
            fresh[-1] = max(fresh[-1], closed + scene.lease)
        last = float(fresh[-1])
        end = last + after_last(scene.way, fresh)
        late = (read <= last) & (ready > last) & np.isfinite(ready)
        timely = ready <= last
        # A late gradient is pushed, dropped, and answered.
        read = np.where(timely, end, np.where(late, ready + scene.way.alone, read))
        moved = timely | late
        taken[moved] += 1
        ready[moved] = read[moved] + scene.compute + draws.take(ranks[moved], taken[moved])
        seconds.append(end - closed)
        closed = end
        dropped, exchanges = dropped + int(late.sum()), exchanges + int(moved.sum())
    return _course(scene, np.array(seconds), exchanges=exchanges, dropped=dropped)


def after_last(way: Way, arrivals: Array) -> float:
    """Returns seconds from the last arrival until all have answers; `Way.lockstep` if all arrive at once.

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


def _course(
    scene: Scene,
    seconds: Array,
    *,
    exchanges: int | None = None,
    dropped: int = 0,
    finished: bool = True,
) -> Course:
    """Returns the course of steps with these lengths."""
    total = float(seconds.sum())
    exchanges = len(seconds) * scene.workers if exchanges is None else exchanges
    counted = exchanges - dropped
    return Course(
        step_seconds=float(np.median(seconds)) if len(seconds) else 0.0,
        steps_per_second=counted / total if total else np.inf,
        seconds=total,
        exchanges=exchanges,
        dropped=dropped,
        busy=exchanges * scene.way.shared,
        finished=finished,
    )
