"""A seed repeats its scenario, and the seeds together reach every fault in every mode."""

from __future__ import annotations

from tests.campaign.scenario import LAST_HOLD, MODES, WIRES, drawn, faults


def test_a_seed_repeats_its_scenario() -> None:
    assert [drawn(seed) for seed in range(50)] == [drawn(seed) for seed in range(50)]


def test_seeds_reach_every_fault_in_every_mode() -> None:
    reached = {(each.mode, each.fault, each.place) for each in map(drawn, range(5000))}
    possible = {
        (mode, *fault)
        for mode in MODES
        for wire in (("gloo",) if mode == "ring" else WIRES)
        for fault in faults(mode, wire)
    }
    assert reached == possible | {(mode, "garbage", "ports") for mode in MODES}


def test_a_fault_fires_before_the_last_steps_on_a_victim_that_exists() -> None:
    for each in map(drawn, range(500)):
        assert 0 < each.step < LAST_HOLD
        assert each.victim < (each.shards if each.place == "shard" else each.workers)
        assert set(each.holders) <= set(range(each.workers))


def test_a_wire_fault_needs_a_wire() -> None:
    assert all(each.wire in ("zmq", "grpc") for each in map(drawn, range(1000)) if each.place == "data")
