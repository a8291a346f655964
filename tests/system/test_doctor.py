"""`ps-server doctor` on machines that lack something: namespaces, lowered limits, small file systems.

Checks get more time than any takes on a busy machine, except where one is to hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
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
    return ["unshare", kinds, "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts need root")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_whole_machine_has_no_failure(cluster: Cluster, tmp_path: Path) -> None:
    report = examine(cluster, "--checkpoint-dir", str(tmp_path / "saved"), code=0)
    names = [found["name"] for found in report.result["findings"]]
    assert any(name.startswith("CUDA") for name in names)
    assert [name for name in names if not name.startswith("CUDA")] == [
        *("packages", "torch", "torch threads", "NCCL", "Gloo", "settings", "cores", "memory"),
        *("shared memory", "/dev/shm", "open files", "memlock", "checkpoint dir", "clock", "own name"),
        *("interfaces", "certificate", "control port", "page's port"),
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
    assert report["server's name"]["state"] == "ok"
    assert f"a ps-server uses {address}: pid {server.process.pid}" in report["control port"]["found"]
    server.process.terminate()
    server.wait()


def test_an_address_at_which_nobody_listens_ends_with_69(cluster: Cluster) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        report = examine(cluster, address, code=69)
    assert report.failures == ["server"]
    assert f"nothing listens at {address}" in report["server"]["found"]
    assert "ps-server start --host 127.0.0.1 --port" in report["server"]["fix"]
    assert [report[name]["state"] for name in ("versions", "clocks")] == ["skipped"] * 2


@pytest.mark.full
def test_who_listens_there_instead_is_told_from_a_server(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        ssh = stack.enter_context(answering(b"SSH-2.0-OpenSSH_9.2\r\n"))
        web = stack.enter_context(answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"))
        other = stack.enter_context(serving(None))
        asked = ([ssh], [web], [other], ["--insecure", ssh], ["--insecure", other])
        doctors = [start(cluster, *arguments) for arguments in asked]
        reports = [Report(doctor, 69) for doctor in doctors]
    assert [report.failures for report in reports] == [["server"]] * len(asked)
    expected = (
        "the process on that port is not ps-server",
        "a web server listens on that port",
        "uses gRPC without TLS, as ps-server does with --insecure",
        "does not answer as a ps-server does",
        "speaks gRPC, but is not a ps-server",
    )
    for report, found in zip(reports, expected, strict=True):
        assert found in report["server"]["found"]
    fix = "if you trust the network, pass --insecure here too"
    assert [report["server"]["fix"] == fix for report in reports] == [False, False, True, False, False]


@pytest.mark.full
def test_a_listener_that_says_nothing_is_told_as_such(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        report = examine(cluster, address, code=69)
    assert "does not answer; it is stopped or is not ps-server" in report["server"]["found"]


@contextlib.contextmanager
def answering(words: bytes) -> Iterator[str]:
    """Somebody who says these words to whoever connects, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:

        def answer() -> None:
            while True:
                try:
                    caller, _ = listening.accept()
                except OSError:  # the listener is closed
                    return
                with caller, contextlib.suppress(OSError):  # who only looks hangs up first
                    caller.sendall(words)

        thread.submit(answer)
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


class OtherServer(ControlServicer):
    """Answers what a doctor asks; anything else is left unimplemented."""

    def __init__(self, report: dict[str, Any], ahead: int) -> None:
        self._report = report
        self._ahead = ahead

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802 - gRPC's name
        return pb.StatusReply(json=json.dumps(self._report))

    def Clock(self, request: pb.ClockRequest, context: Any) -> pb.ClockReply:  # noqa: N802 - gRPC's name
        return pb.ClockReply(time_ns=time.time_ns() + self._ahead)


@contextlib.contextmanager
def serving(report: dict[str, Any] | None, ahead: int = 0) -> Iterator[str]:
    """A gRPC server with this report, or with no service at all."""
    server = grpc.server(ThreadPoolExecutor(4))
    if report is not None:
        add_ControlServicer_to_server(OtherServer(report, ahead), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_server_of_another_protocol_ends_with_78(cluster: Cluster) -> None:
    with serving({"version": "9.9.9", "protocol": PROTOCOL + 1, "job": "", "state": "waiting"}) as address:
        report = examine(cluster, "--insecure", address, code=78)
    assert report.failures == ["versions"]
    assert f"9.9.9 (protocol {PROTOCOL + 1}) at {address}" in report["versions"]["found"]
    assert "hubring==9.9.9" in report["versions"]["fix"]


def test_a_server_from_before_versions_were_told_ends_with_78(cluster: Cluster) -> None:
    with serving({"job": "", "state": "waiting"}) as address:
        report = examine(cluster, "--insecure", address, code=78)
    assert "version unknown (protocol unknown)" in report["versions"]["found"]


def test_a_server_whose_clock_is_off_is_a_warning(cluster: Cluster) -> None:
    hour = 3600 * 10**9
    with serving({"version": "9.9.9", "protocol": PROTOCOL, "job": "", "state": "waiting"}, -hour) as address:
        report = examine(cluster, "--insecure", address, code=0)
    assert (report["versions"]["state"], report["clocks"]["state"]) == ("warning", "warning")
    assert "behind this machine's" in report["clocks"]["found"]


def test_an_address_that_is_none_is_refused_before_anything_is_looked_at(cluster: Cluster) -> None:
    program = cluster.run("doctor", "hubring.ps.cli", "doctor", "localhost")
    assert "expected HOST:PORT" in program.done(78)["error"]


@pytest.mark.full
def test_somebody_elses_port_is_told_with_who_it_is(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        report = examine(cluster, code=0, within=["env", f"PS_PAGE_PORT={port}"])
    assert report["page's port"]["state"] == "warning"
    assert f"127.0.0.1:{port} is taken by pid {os.getpid()}" in report["page's port"]["found"]
    assert report["page's port"]["fix"] == "run ps-server start --page-port 0, or stop that process"


def test_unknown_settings_in_the_environment_are_all_told(cluster: Cluster) -> None:
    report = examine(cluster, code=78, within=["env", "PS_WORKER=2", "PS_CHECKPOINTDIR=x", "PS_MODE=asp"])
    told = [found for found in report.result["findings"] if found["name"] == "settings"]
    assert ["PS_WORKERS" in told[0]["found"], "PS_CHECKPOINT_DIR" in told[1]["found"]] == [True, True]
    assert len(told) == 2


@needs_root
def test_a_small_shared_memory_is_a_failure_for_others_and_not_for_the_hub(cluster: Cluster) -> None:
    report = examine(cluster, code=78, within=in_namespace("-m", "mount -t tmpfs -o size=1m tmpfs /dev/shm"))
    assert report.failures == ["/dev/shm"]
    assert "1 MiB of 1 MiB free" in report["/dev/shm"]["found"]
    assert "--shm-size" in report["/dev/shm"]["fix"]
    assert report["shared memory"]["state"] == "ok"


@needs_root
def test_a_shared_memory_that_cannot_be_written_is_a_failure(cluster: Cluster) -> None:
    report = examine(
        cluster, code=78, within=in_namespace("-m", "mount -t tmpfs -o size=1m,ro tmpfs /dev/shm")
    )
    assert report["/dev/shm"]["found"].startswith("cannot be written: Read-only file system")


def test_a_machine_that_lets_nothing_start_says_so(cluster: Cluster) -> None:
    program = cluster.run("doctor", "hubring.ps.cli", "doctor", within=["prlimit", "--nofile=20:20"])
    assert "Too many open files; raise ulimit -n" in program.done(78)["error"]


def test_lowered_limits_are_told(cluster: Cluster) -> None:
    lowered = ["prlimit", "--nofile=60:60", "--memlock=65536:65536"]
    report = examine(cluster, code=78, within=lowered)
    assert report.failures == ["open files"]
    assert "at most 60" in report["open files"]["found"]
    assert report["memlock"]["found"].startswith("64 KiB")


@needs_root
def test_a_full_folder_for_checkpoints_is_a_failure(cluster: Cluster, small: Path) -> None:
    free = os.statvfs(small)
    (small / "rest").write_bytes(bytes(free.f_bavail * free.f_frsize))
    report = examine(cluster, "--checkpoint-dir", str(small / "run"), code=78)
    assert report["checkpoint dir"]["found"].startswith(f"{small} is full")
    assert f"df -h {small}" in report["checkpoint dir"]["fix"]


@needs_root
def test_a_read_only_folder_for_checkpoints_is_a_failure(cluster: Cluster, small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    report = examine(cluster, "--checkpoint-dir", str(small), code=78)
    assert report["checkpoint dir"]["found"] == f"{small} is read-only"


@needs_root
def test_a_folder_that_is_memory_is_a_warning(cluster: Cluster, small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=3g", str(small)], check=True)
    report = examine(cluster, "--checkpoint-dir", str(small), code=0)
    assert report["checkpoint dir"]["state"] == "warning"
    assert "lost when this machine restarts" in report["checkpoint dir"]["found"]
    assert [*small.iterdir()] == []


@needs_root
def test_a_machine_whose_name_is_anothers_address_is_a_failure(cluster: Cluster, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n203.0.113.9 node7\n")
    report = examine(
        cluster, code=78, within=in_namespace("-mu", f"mount --bind {hosts} /etc/hosts", "hostname node7")
    )
    assert report.failures == ["own name"]
    assert "203.0.113.9 is not an address of this machine" in report["own name"]["found"]


@needs_root
@pytest.mark.full
def test_a_machine_whose_name_is_loopback_is_a_warning(cluster: Cluster, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node7\n")
    networked = [
        "ip link set lo up",
        "ip link add eth0 type veth peer name eth1",
        "ip addr add 10.9.0.7/24 dev eth0",
    ]
    networked += ["ip link set eth1 up", "ip link set eth0 up", "ip route add default via 10.9.0.1"]
    named = [f"mount --bind {hosts} /etc/hosts", "hostname node7"]
    report = examine(cluster, code=0, within=in_namespace("-mun", *named, *networked))
    assert report["own name"]["state"] == "warning"
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
def test_a_server_in_a_network_that_nothing_leads_to_ends_with_69(cluster: Cluster) -> None:
    report = examine(cluster, "10.9.9.9:5555", code=69, within=in_namespace("-n", "ip link set lo up"))
    assert sorted(report.failures) == ["interfaces", "server"]
    assert "no route to 10.9.9.9:5555" in report["server"]["found"]


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
        program = cluster.run("doctor", "hubring.ps.cli", "doctor", "--timeout", "10", within=within)
        report = Report(program, 78)
    assert report["own name"]["found"].startswith("no answer within 1")
    assert "/etc/resolv.conf" in report["own name"]["fix"]
    assert report["memlock"]["state"] == "ok"


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
        mute.accept()[0].close()  # the first connection of the check, which is at work then
        program.process.terminate()
        result = program.done(143)
    assert result == {"error": "stopped by a signal", "exit_code": 143}
