"""`ps-server doctor` on machines that lack something: namespaces, lowered limits, small file systems.

Checks get more time than any takes on a busy machine, except where one is to hang.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.core.types import PROTOCOL
from tests.support.processes.cluster import Cluster, Program

pytestmark = pytest.mark.slow

FRESH = ("env",)
"""What starts a process anew: the doctor knows processes by their commands."""
LONG = "80"


class Report:
    """What a doctor found, by name."""

    def __init__(self, program: Program, code: int) -> None:
        self.result: dict[str, Any] = program.done(code)
        self.said = program.said()
        assert len(program.out.read_text().splitlines()) == 1

    def __getitem__(self, name: str) -> dict[str, str]:
        [found] = [found for found in self.result["findings"] if found["name"] == name]
        return found

    @property
    def failures(self) -> list[str]:
        return [found["name"] for found in self.result["findings"] if found["state"] == "failure"]


def start(cluster: Cluster, *arguments: str, within: Sequence[str] = FRESH) -> Program:
    count = sum(program.name.startswith("doctor") for program in cluster.programs)
    return cluster.run(
        f"doctor{count}", "hubring.ps.cli", "doctor", "--timeout", LONG, *arguments, within=within
    )


def examine(cluster: Cluster, *arguments: str, code: int, within: Sequence[str] = FRESH) -> Report:
    return Report(start(cluster, *arguments, within=within), code)


def in_namespace(kinds: str, *commands: str) -> list[str]:
    """Runs what follows in new namespaces, after these commands."""
    return [*FRESH, "unshare", kinds, "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts need root")


def test_a_whole_machine_has_no_failure(cluster: Cluster, tmp_path: Path) -> None:
    report = examine(cluster, "--checkpoint-dir", str(tmp_path / "saved"), code=0)
    names = [found["name"] for found in report.result["findings"]]
    assert any(name.startswith("CUDA") for name in names)
    assert [name for name in names if not name.startswith("CUDA")] == [
        *("packages", "torch", "torch threads", "NCCL", "Gloo", "settings", "memory", "shared memory"),
        *("/dev/shm", "checkpoint dir", "clock", "own name", "interfaces", "certificate", "control port"),
        "page's port",
    ]
    assert (report.result["failures"], report.result["server"]) == (0, None)
    assert report["Gloo"]["found"] == "2 ranks on 127.0.0.1 connected and reduced correctly"
    assert f"protocol {PROTOCOL}" in report["packages"]["found"]
    assert not (tmp_path / "saved").exists()
    for found in report.result["findings"]:
        assert found["name"] in report.said
        assert found["found"] in report.said
        assert bool(found["fix"]) == (found["state"] in ("warning", "failure"))


@pytest.mark.full
def test_a_server_of_ours_is_found_well_and_its_port_is_known_as_taken(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "2", "--once", "--no-page", within=FRESH)
    port = address.rpartition(":")[2]
    report = examine(cluster, address, code=0, within=["env", f"PS_PORT={port}"])
    assert "waiting for" in report["server"]["found"]
    assert report["versions"]["state"] == "ok"
    assert report["clocks"]["state"] == "ok"
    assert f"a ps-server uses {address}: pid {server.process.pid}" in report["control port"]["found"]
    server.process.terminate()
    server.wait()


def test_an_address_that_is_none_is_refused_before_anything_is_looked_at(cluster: Cluster) -> None:
    program = cluster.run("doctor", "hubring.ps.cli", "doctor", "localhost")
    assert "expected HOST:PORT" in program.done(78)["error"]


@needs_root
def test_all_problems_of_a_machine_are_reported_together(cluster: Cluster, tmp_path: Path) -> None:
    """Its name is loopback, its shared memory is small and its folder for checkpoints read-only."""
    hosts, saved = tmp_path / "hosts", tmp_path / "saved"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node7\n")
    saved.mkdir()
    sick = [
        *(f"mount --bind {hosts} /etc/hosts", "hostname node7"),
        *("mount -t tmpfs -o size=1m tmpfs /dev/shm", f"mount -t tmpfs -o ro tmpfs {saved}"),
        *("ip link set lo up", "ip link add eth0 type veth peer name eth1"),
        *("ip addr add 10.9.0.7/24 dev eth0", "ip link set eth1 up", "ip link set eth0 up"),
        "ip route add default via 10.9.0.1",
    ]
    within = in_namespace("-mun", *sick)
    report = examine(cluster, "--checkpoint-dir", str(saved / "run"), code=78, within=within)
    assert report.failures == ["/dev/shm", "checkpoint dir"]
    assert "1 MiB of 1 MiB free" in report["/dev/shm"]["found"]
    assert report["shared memory"]["state"] == "ok"
    assert report["checkpoint dir"]["found"].endswith(f"cannot write to {saved}: Read-only file system")
    assert "node7 is 127.0.1.1, which only this machine reaches" in report["own name"]["found"]
    assert "map node7 to 10.9.0.7" in report["own name"]["fix"]
    assert "other machines use eth0 10.9.0.7" in report["interfaces"]["found"]


@pytest.mark.full
@needs_root
def test_without_a_loopback_interface_gloo_cannot_add(cluster: Cluster) -> None:
    report = examine(cluster, code=78, within=in_namespace("-n", "true"))
    assert "Gloo" in report.failures
    assert "ip link set lo up" in report["Gloo"]["fix"]


@needs_root
@pytest.mark.full
def test_a_resolver_that_hangs_holds_up_nobody_else(cluster: Cluster, tmp_path: Path) -> None:
    """A name server takes questions and never answers."""
    for name, text in {
        "resolv.conf": "nameserver 127.0.0.79\noptions timeout:30 attempts:5\n",
        "nsswitch.conf": "hosts: dns\n",
        "hosts": "127.0.0.1 localhost\n",
    }.items():
        (tmp_path / name).write_text(text)
    mounts = [
        f"mount --bind {tmp_path / name} {Path('/etc', name).resolve()}"
        for name in ("resolv.conf", "nsswitch.conf")
    ]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.0.0.79", 53))
        within = in_namespace("-mu", *mounts, "hostname node7")
        program = cluster.run("doctor", "hubring.ps.cli", "doctor", "--timeout", "20", within=within)
        report = Report(program, 78)
    assert report["own name"]["found"].startswith("no answer within 20 s")
    assert "/etc/resolv.conf" in report["own name"]["fix"]
    assert report["memory"]["state"] != "failure"


@pytest.mark.full
def test_a_torch_that_does_not_load_is_a_failure_and_hides_nothing(cluster: Cluster, tmp_path: Path) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text(
        "import os, sys\nprint('illegal instruction', file=sys.stderr, flush=True)\nos.abort()\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    report = examine(cluster, code=78, within=["env", f"PYTHONPATH={path}"])
    assert report.failures == ["torch"]
    assert [report[name]["found"] for name in ("CUDA", "NCCL", "Gloo")] == ["torch failed"] * 3
    words = "the check was killed by signal 6 (SIGABRT); last output: illegal instruction"
    assert report["torch"]["found"] == words
    assert report["memory"]["state"] != "failure"


def test_it_stops_when_it_is_told_to_and_leaves_nothing(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        program = start(cluster, address)
        program.until_said("checking this machine")
        with mute.accept()[0]:  # the first connection of the check, which is at work until it is answered
            program.process.terminate()
            result = program.done(143)
    assert result == {"error": "stopped by a signal", "exit_code": 143}
