"""A seed repeats its scenario, and the seeds together reach every fault in every mode."""

from __future__ import annotations

from tests.campaign.scenario import (
    BEFORE_OPTIMIZER,
    BEFORE_STEP,
    IN_INIT,
    KILL_MODES,
    MODES,
    WIRES,
    drawn,
    drawn_kill,
    drawn_start,
    faults,
)


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


def test_kills_reach_every_process_of_a_server_with_standbys_in_every_mode() -> None:
    kills = [drawn_kill(seed) for seed in range(500)]
    reached = {(each.mode, each.target.rstrip("01")) for each in kills}
    of_a_ring = {"coordinator", "standby of coordinator", "server-"}
    of_a_hub = {*of_a_ring, "shard ", "standby of shard "}
    assert reached == {
        (mode, name) for mode in KILL_MODES for name in (of_a_ring if mode == "ring" else of_a_hub)
    }
    assert all(each.fault == "kill" and each.standby for each in kills)
    pairs = {frozenset((each.target.rstrip("01"), each.also.rstrip("01"))) for each in kills if each.also}
    of_shards = ("shard ", "standby of shard ")
    assert pairs == {frozenset((one, two)) for one in of_a_ring for two in of_shards}


def test_workers_end_at_each_moment_before_the_first_step_in_every_mode() -> None:
    starts = [drawn_start(seed) for seed in range(500)]
    assert {(each.mode, each.step) for each in starts if each.step < BEFORE_STEP} == {
        (mode, step) for mode in KILL_MODES for step in (IN_INIT, BEFORE_OPTIMIZER)
    }
    assert {each.mode for each in starts if each.step == BEFORE_STEP} == {"bsp", "aggregate"}
