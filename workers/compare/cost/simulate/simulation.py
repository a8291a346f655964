"""Simulation of what formulas do not cover: stragglers, bounded staleness, queues, incast and losses."""

from __future__ import annotations

from hubring.workers.compare.cost.simulate.asynchronous import Crowd
from hubring.workers.compare.cost.simulate.lockstep import all_but_some, all_for_all, around_the_ring
from hubring.workers.compare.cost.simulate.scene import Course, Scene


def simulate(scene: Scene) -> Course:
    """Simulates a scene; the same scene has the same result.

    With equal workers it agrees with the formulas: exactly in lockstep, else in the long run.
    """
    if scene.rule == "ring":
        return around_the_ring(scene)
    if scene.rule == "bsp":
        return all_for_all(scene)
    if scene.rule == "backup":
        return all_but_some(scene)
    return Crowd(scene).run()
