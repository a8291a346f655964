"""A seed repeats its scenario, and the seeds together reach every fault in every mode."""

from __future__ import annotations

from tests.campaign.scenario import KILL_MODES, MODES, WIRES, drawn, drawn_kill, faults


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
