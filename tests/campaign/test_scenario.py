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
        for standby in ((False,) if mode == "ring" else (False, True))
        for fault in faults(mode, wire, standby)
    }
    assert reached == possible | {(mode, "garbage", "ports") for mode in MODES}


def test_a_fault_fires_before_the_last_steps_on_a_victim_that_exists() -> None:
    for each in map(drawn, range(500)):
        assert 0 < each.step < LAST_HOLD
        most = {"shard": each.shards, "guarded shard": each.shards, "standby": each.shards + 1}
        assert each.victim < most.get(each.place, each.workers)
        assert set(each.holders) <= set(range(each.workers))


def test_a_third_of_the_jobs_on_a_hub_has_standbys() -> None:
    hubs = [each for each in map(drawn, range(3000)) if not each.ring]
    assert 0.3 < sum(each.standby for each in hubs) / len(hubs) < 0.37
    guarded = {"guarded shard", "guarded coordinator", "standby", "guardian"}
    assert all(each.standby for each in hubs if each.place in guarded)
    assert not any(each.standby for each in hubs if each.place in ("shard", "coordinator"))


def test_a_standby_s_number_is_its_shard_s_or_comes_after_all_shards() -> None:
    names = {
        (each.shards, each.victim): each.target for each in map(drawn, range(3000)) if each.place == "standby"
    }
    assert names == {
        (1, 0): "standby of shard 0",
        (1, 1): "standby of coordinator",
        (2, 0): "standby of shard 0",
        (2, 1): "standby of shard 1",
        (2, 2): "standby of coordinator",
    }


def test_a_wire_fault_needs_a_wire() -> None:
    assert all(each.wire in ("zmq", "grpc") for each in map(drawn, range(1000)) if each.place == "data")
