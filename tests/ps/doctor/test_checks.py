"""All judgements of the doctor together."""

from __future__ import annotations

from hubring.ps.doctor import network
from hubring.ps.doctor.network import Answer
from tests.ps.doctor import (
    test_certificate,
    test_collectives,
    test_disk,
    test_gpu,
    test_machine,
    test_network,
    test_server,
    test_software,
)

CASES = [
    case
    for module in (
        *(test_certificate, test_collectives, test_disk, test_gpu, test_machine),
        *(test_network, test_server, test_software),
    )
    for case in module.CASES
]


def test_every_judgement_is_among_the_cases() -> None:
    """So that no new failure comes without its sentence being read here."""
    states = {(case.finding.name, case.state) for case in CASES}
    assert {name for name, state in states if state == "failure"} >= {
        *("packages", "torch", "CUDA", "CUDA 0", "NCCL", "Gloo", "settings", "memory"),
        *("shared memory", "/dev/shm"),
        *("open files", "checkpoint dir", "clock", "own name", "server's name", "interfaces", "control port"),
        *("NCCL_SOCKET_IFNAME", "server", "versions"),
    }
    assert {name for name, state in states if state == "warning"} >= {
        *("torch threads", "cores", "memlock", "clocks", "GLOO_SOCKET_IFNAME"),
    }


def test_every_failure_of_reaching_the_server_ends_with_69() -> None:
    codes = {
        case.finding.exit_code for case in CASES if case.finding.name == "server" and case.state == "failure"
    }
    assert codes == {69}
    assert network.judge_no_route("hub1", "none").exit_code == 69
    assert network.judge_server_name(Answer("hub1", [], "unknown"), here=False).exit_code == 69
