"""Every sentence of the doctor, without breaking a machine: what is found, how bad it is, and the mend."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from ps.config import ServerConfig
from ps.doctor import (
    clock,
    cuda,
    disk,
    environment,
    gloo,
    interfaces,
    limits,
    listeners,
    memory,
    names,
    nccl,
    packages,
    peer,
    ports,
    processors,
    screen,
    shared_memory,
    subject,
    torch_build,
    verdict,
)
from ps.doctor.cgroup import Memory
from ps.doctor.cuda import Cuda, Gpu
from ps.doctor.disk import Disk
from ps.doctor.finding import Finding, State, failure, ok, skipped, warning
from ps.doctor.listeners import Listener
from ps.doctor.names import Answer
from ps.doctor.nccl import Nccl
from ps.doctor.packages import Requirement
from ps.doctor.peer import End
from ps.doctor.ports import Port
from ps.doctor.sizes import GIB, MIB, spelt
from ps.doctor.torch_build import Build
from ps.errors import ConfigError
from ps.offset import Offset

ADDR = "hub1:5555"
HERE = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": ""}
H100 = Gpu("NVIDIA H100", (9, 0), 70 * GIB, 80 * GIB)
CUDA = Cuda(
    "2.13.0+cu130", "13.0", ["sm_80", "sm_90", "compute_90"], ["/dev/nvidia0"], "580.95.05", None, [H100], ""
)
BLIND = CUDA._replace(gpus=[], arches=[])
NO_GPU = BLIND._replace(files=[], driver=None)
CONTROL = Port("control port", 5555, "--port")
NAMED = Answer("node7", ["10.0.0.7"])
DIR = Disk(Path("/saved/run"), Path("/saved"), 0, 0.004, 40 * GIB, "ext4", 2 * GIB)
SECOND = 10**9
NEEDED = [Requirement("grpcio", "1.85"), Requirement("protobuf", "7")]


def only(findings: Sequence[Finding]) -> Finding:
    [finding] = findings
    return finding


class Case(NamedTuple):
    finding: Finding
    state: State
    found: str
    mend: str = ""


CASES = [
    # Packages.
    Case(
        packages.judge(NEEDED, {"grpcio": "1.85.1", "protobuf": "7.36.2"}, "hubring 1"),
        "ok",
        "hubring 1, grpcio 1.85.1, protobuf 7.36.2",
    ),
    Case(
        packages.judge(NEEDED, {"grpcio": "1.60.0", "protobuf": None}, "hubring 1"),
        "failure",
        "grpcio 1.60.0, at least 1.85 is needed, no protobuf",
        "pip install 'grpcio>=1.85' 'protobuf>=7'",
    ),
    # torch.
    Case(
        torch_build.judge(Build("2.13.0+cpu", "AVX512", True), Requirement("torch", "2.13")),
        "ok",
        "2.13.0+cpu, computes with AVX512",
    ),
    Case(
        torch_build.judge(Build("2.4.1", "AVX2", True), Requirement("torch", "2.13")),
        "failure",
        "torch 2.4.1, at least 2.13 is needed",
        "pip install 'torch>=2.13'",
    ),
    Case(
        torch_build.judge(Build("2.13.0", "AVX2", False), Requirement("torch", "2.13")),
        "failure",
        "multiplies two matrices of ones wrongly",
        "--force-reinstall torch",
    ),
    Case(torch_build.judge_threads(2, 2.0), "ok", "2 on 2 core(s)"),
    Case(torch_build.judge_threads(1, 0.5), "ok", "1 on 0.5 core(s)"),
    Case(
        torch_build.judge_threads(16, 2.5),
        "warning",
        "16 threads where 2.5 core(s) may be used",
        "export OMP_NUM_THREADS=2",
    ),
    # CUDA.
    Case(only(cuda.judge(CUDA)), "ok", "NVIDIA H100 (sm_90), 70 GiB of 80 GiB free, driver 580.95.05"),
    Case(only(cuda.judge(NO_GPU)), "skipped", "no GPU here (torch 2.13.0+cu130 is built for CUDA 13.0)"),
    Case(
        only(cuda.judge(NO_GPU._replace(torch="2.13.0+cpu", built_for=None))),
        "skipped",
        "no GPU here (torch 2.13.0+cpu is built without CUDA)",
    ),
    Case(
        only(cuda.judge(BLIND._replace(torch="2.13.0+cpu", built_for=None))),
        "warning",
        "1 GPU(s) here, but torch 2.13.0+cpu is built without CUDA: training runs on the CPU",
        "pip install torch --index-url",
    ),
    Case(
        only(cuda.judge(BLIND._replace(visible=""))), "skipped", "CUDA_VISIBLE_DEVICES='' hides the 1 GPU(s)"
    ),
    Case(
        only(cuda.judge(BLIND._replace(driver="470.57", trouble="The NVIDIA driver is too old"))),
        "failure",
        "built for CUDA 13.0 and cannot use them (driver 470.57): The NVIDIA driver is too old",
        "a newer driver, or torch for the CUDA that nvidia-smi shows",
    ),
    Case(
        only(cuda.judge(BLIND._replace(driver=None))),
        "failure",
        "(no driver tells its version): it sees none",
        "a newer driver",
    ),
    Case(
        only(cuda.judge(CUDA._replace(gpus=[H100._replace(name="Tesla P100", capability=(6, 0))]))),
        "failure",
        "Tesla P100 (sm_60): torch 2.13.0+cu130 has kernels for sm_80, sm_90, compute_90 only",
        "CUDA_VISIBLE_DEVICES without it",
    ),
    Case(
        only(cuda.judge(CUDA._replace(gpus=[H100._replace(trouble="uncorrectable ECC error")]))),
        "failure",
        "does not compute: uncorrectable ECC error",
        "nvidia-smi -q -i 0; or CUDA_VISIBLE_DEVICES without it",
    ),
    Case(
        only(cuda.judge(CUDA._replace(gpus=[H100._replace(free=2 * GIB)]))),
        "warning",
        "2 GiB of 80 GiB free: others have the rest",
        "nvidia-smi shows who",
    ),
    # NCCL.
    Case(nccl.judge(Nccl("2.27.5", 4, "")), "ok", "2.27.5 in torch's build adds over the 4 GPU(s)"),
    Case(nccl.judge(Nccl("2.27.5", 0, "")), "skipped", "NCCL adds on GPUs alone (2.27.5 in torch's build)"),
    Case(nccl.judge(Nccl(None, 0, "")), "skipped", "none in torch's build either"),
    Case(
        nccl.judge(Nccl(None, 2, "")),
        "warning",
        "a ring over the 2 GPU(s) goes through the host's memory",
        "ps-worker --backend gloo",
    ),
    Case(
        nccl.judge(Nccl("2.27.5", 2, "unhandled system error")),
        "failure",
        "cannot add over the 2 GPU(s): unhandled system error",
        "NCCL_DEBUG=INFO",
    ),
    # Gloo.
    Case(gloo.judge("10.0.0.7", ""), "ok", "2 ranks on 10.0.0.7 met and added right"),
    Case(
        gloo.judge("127.0.0.1", "Network is unreachable"),
        "failure",
        "2 ranks on 127.0.0.1 could not add: Network is unreachable",
        "ip link set lo up",
    ),
    Case(
        gloo.judge("10.0.0.7", "timed out"),
        "failure",
        "2 ranks on 10.0.0.7 could not add: timed out",
        "let this machine reach itself at 10.0.0.7 on any TCP port: iptables -L",
    ),
    # Settings.
    Case(only(environment.judge({}, "", [])), "ok", "no PS_* variable is set"),
    Case(
        only(environment.judge({}, "", ["PS_MODE", "PS_PORT"])), "ok", "PS_MODE, PS_PORT: known and allowed"
    ),
    Case(
        only(
            environment.judge({"PS_WORKER": "no such setting; did you mean PS_WORKERS?"}, "", ["PS_WORKER"])
        ),
        "failure",
        "did you mean PS_WORKERS?",
        "correct it, or leave PS_WORKER out",
    ),
    Case(
        only(environment.judge({}, "--staleness 3 means something only with --mode ssp", ["PS_STALENESS"])),
        "warning",
        "--staleness 3 means something only with --mode ssp",
        "give the flag, which stands over the environment",
    ),
    # Cores and memory.
    Case(processors.judge(16, 16, None, None), "ok", "16"),
    Case(processors.judge(16, 4, 8.0, None), "ok", "4 of the machine's 16 may be used"),
    Case(
        processors.judge(16, 16, 1.5, None),
        "warning",
        "16, but the control group may use the time of 1.5 only: programs start 16 threads",
        "export OMP_NUM_THREADS=1",
    ),
    Case(processors.judge(16, 16, 2.0, "2"), "ok", "OMP_NUM_THREADS=2 says how many threads start"),
    Case(memory.judge(64 * GIB, 60 * GIB, None), "ok", "60 GiB of 64 GiB available"),
    Case(
        memory.judge(64 * GIB, 60 * GIB, Memory(80 * GIB, 10 * GIB)),
        "ok",
        "60 GiB of 64 GiB available",
    ),
    Case(
        memory.judge(64 * GIB, 1 * GIB, None),
        "warning",
        "1 GiB of 64 GiB available: enough for a small",
        "stop what",
    ),
    Case(
        memory.judge(64 * GIB, 60 * GIB, Memory(1 * GIB, 900 * MIB)),
        "failure",
        "124 MiB left of the 1 GiB that the control group may have",
        "docker run --memory",
    ),
    Case(
        memory.judge(64 * GIB, 60 * GIB, Memory(1 * GIB, 2 * GIB)),
        "failure",
        "0 bytes left of the 1 GiB",
        "Kubernetes limits.memory",
    ),
    # Shared memory.
    Case(shared_memory.judge(16 * GIB, 15 * GIB, ""), "ok", "15 GiB of 16 GiB free"),
    Case(
        shared_memory.judge(64 * MIB, 63 * MIB, ""),
        "warning",
        "63 MiB of 64 MiB free: may run out",
        "docker run --shm-size 1g",
    ),
    Case(
        shared_memory.judge(1 * MIB, 1 * MIB, ""),
        "failure",
        "not enough for one batch; DataLoader(num_workers=...) and NCCL need it",
        "mount -o remount,size=1g /dev/shm",
    ),
    Case(
        shared_memory.judge(0, 0, "there is no /dev/shm"),
        "failure",
        "there is no /dev/shm",
        "mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm",
    ),
    Case(shared_memory.judge_own(""), "ok", "can share memory"),
    Case(
        shared_memory.judge_own("[Errno 1] Operation not permitted"),
        "failure",
        "memory without a name (memfd) cannot be had: [Errno 1] Operation not permitted",
        "ps-worker --transport zmq",
    ),
    # Limits.
    Case(limits.judge_files(1024, 4096), "ok", "1024"),
    Case(limits.judge_files(-1, -1), "ok", "unlimited"),
    Case(limits.judge_files(256, -1), "warning", "256 at most", "ulimit -n 65536"),
    Case(limits.judge_files(256, 4096), "warning", "256 at most", "ulimit -n 4096"),
    Case(limits.judge_files(60, 60), "failure", "60 at most, and a shard", "raise the hard limit of 60"),
    Case(limits.judge_memlock(-1, 1, []), "ok", "unlimited"),
    Case(
        limits.judge_memlock(8 * MIB, 0, []), "ok", "8 MiB; nothing here locks memory, without GPU and RDMA"
    ),
    Case(
        limits.judge_memlock(8 * MIB, 2, ["mlx5_0"]),
        "warning",
        "8 MiB, and 2 GPU(s) and RDMA by mlx5_0 lock buffers in memory",
        "ulimit -l unlimited",
    ),
    # Disk.
    Case(disk.judge(DIR), "ok", "/saved/run: 40 GiB free, 1 MiB synced in 4 ms"),
    Case(
        disk.judge(DIR._replace(refusal=errno.ENOSPC)),
        "failure",
        "/saved is full",
        "make room (df -h /saved)",
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.EDQUOT)), "failure", "/saved is full (Disk quota", "make room"
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.EROFS)), "failure", "/saved is read-only", "mount -o remount,rw"
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.EACCES)), "failure", "/saved may not be written by", "chown -R"
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.ENOTDIR)), "failure", "is no folder", "another --checkpoint-dir"
    ),
    Case(disk.judge(DIR._replace(refusal=errno.EIO)), "failure", "Input/output error", "dmesg"),
    Case(
        disk.judge(DIR._replace(free=1 * GIB)),
        "failure",
        "1 GiB free, too little for one more checkpoint like the newest, 2 GiB",
        "make room (df -h /saved)",
    ),
    Case(disk.judge(DIR._replace(free=100 * MIB, newest=0)), "warning", "100 MiB free only", "make room"),
    Case(disk.judge(DIR._replace(kind="overlay")), "warning", "gone with the container", "docker run -v"),
    Case(
        disk.judge(DIR._replace(kind="tmpfs")),
        "warning",
        "gone when this machine restarts",
        "a volume or a disk",
    ),
    Case(
        disk.judge(DIR._replace(seconds=2.5)), "warning", "1 MiB took 2.5 s to sync", "a disk of this machine"
    ),
    Case(only([*disk.examine(None)]), "skipped", "none is set (--checkpoint-dir, PS_CHECKPOINT_DIR)"),
    # Clocks.
    Case(clock.judge([1, 2, 2], datetime(2027, 1, 1, tzinfo=UTC)), "ok", "2027-01-01 00:00:00 UTC"),
    Case(
        clock.judge([1, 9, 4], datetime(2027, 1, 1, tzinfo=UTC)),
        "failure",
        "went back by 5 ns",
        "current_clocksource",
    ),
    Case(
        clock.judge([1, 2], datetime(1970, 1, 1, tzinfo=UTC)), "warning", "it shows 1970-01-01", "timedatectl"
    ),
    Case(
        peer.judge_clocks(Offset(2_000_000, 400_000), ADDR), "ok", "is +2 ms from this machine's, to 0.2 ms"
    ),
    Case(
        peer.judge_clocks(Offset(90 * SECOND, 400_000), ADDR),
        "warning",
        "the clock of hub1:5555 is 90.0 s ahead of this machine's (round trip 0.4 ms)",
        "chronyc makestep",
    ),
    Case(
        peer.judge_clocks(Offset(-3 * SECOND, 0), ADDR),
        "warning",
        "is 3.0 s behind this machine's",
        "timedatectl",
    ),
    Case(peer.judge_clocks(Offset(3 * SECOND, 5 * SECOND), ADDR), "ok", "to 2.5e+03 ms"),
    # Names.
    Case(names.judge_own(NAMED, [], "10.0.0.7"), "ok", "node7 is 10.0.0.7"),
    Case(
        names.judge_own(Answer("node7", [], "Name or service not known"), [], "10.0.0.7"),
        "warning",
        "node7: Name or service not known",
        "echo '10.0.0.7 node7' >> /etc/hosts",
    ),
    Case(
        names.judge_own(Answer("node7", ["127.0.1.1"]), [], "10.0.0.7"),
        "warning",
        "node7 is 127.0.1.1, which only this machine reaches",
        "in /etc/hosts let node7 be 10.0.0.7",
    ),
    Case(names.judge_own(Answer("node7", ["127.0.0.1"]), [], "127.0.0.1"), "ok", "node7 is 127.0.0.1"),
    Case(
        names.judge_own(Answer("node7", ["10.0.0.9"]), ["10.0.0.9"], "10.0.0.7"),
        "failure",
        "10.0.0.9 is no address of this machine: who dials the name gets another",
        "ps-server start --host 10.0.0.7",
    ),
    Case(
        names.judge_own(NAMED._replace(seconds=5.2), [], "10.0.0.7"),
        "warning",
        "found only after 5.2 s",
        "/etc/resolv.conf",
    ),
    Case(names.judge_server(Answer("hub1", ["10.0.0.1"]), here=False), "ok", "hub1 is 10.0.0.1"),
    Case(
        names.judge_server(Answer("hub1", [], "Name or service not known"), here=False),
        "failure",
        "hub1: Name or service not known",
        "check its spelling",
    ),
    Case(
        names.judge_server(Answer("hub1", ["127.0.1.1"]), here=False),
        "warning",
        "hub1 is 127.0.1.1, which is this machine and no other",
        "correct it in /etc/hosts",
    ),
    Case(names.judge_server(Answer("node7", ["127.0.1.1"]), here=True), "ok", "node7 is 127.0.1.1"),
    # Interfaces.
    Case(interfaces.judge(HERE, "10.0.0.7", "10.0.0.7"), "ok", "a ring meets on eth0 10.0.0.7"),
    Case(
        interfaces.judge(HERE, "127.0.0.1", "10.0.0.7"),
        "ok",
        "lo 127.0.0.1, for workers of this machine alone; to others it is eth0 10.0.0.7",
    ),
    Case(
        interfaces.judge_way("hub1", "no address of this machine leads to 'hub1'"),
        "failure",
        "hub1",
        "ip route get",
    ),
    Case(
        only(interfaces.judge_named(HERE, "eth7", None)),
        "warning",
        "names an interface that is not here; there are lo 127.0.0.1, eth0 10.0.0.7",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    Case(
        only(interfaces.judge_named(HERE, "eth0", "=eth1")),
        "failure",
        "NCCL_SOCKET_IFNAME='=eth1' leaves no interface",
        "export NCCL_SOCKET_IFNAME=eth0, or unset NCCL_SOCKET_IFNAME",
    ),
    # Ports.
    Case(ports.judge(CONTROL, "127.0.0.1", 0, None), "ok", "127.0.0.1:5555 is free"),
    Case(ports.judge(CONTROL._replace(number=0), "127.0.0.1", 0, None), "ok", "a free one will be taken"),
    Case(
        ports.judge(CONTROL, "::1", errno.EADDRINUSE, Listener(7, "/usr/sbin/nginx -g")),
        "warning",
        "[::1]:5555 is taken by pid 7 (/usr/sbin/nginx -g)",
        "ps-server start --port 0, or stop that",
    ),
    Case(
        ports.judge(CONTROL, "127.0.0.1", errno.EADDRINUSE, Listener(None)),
        "warning",
        "a process that this user may not see",
        "ps-server start --port 0",
    ),
    Case(
        ports.judge(CONTROL, "127.0.0.1", errno.EADDRINUSE, None),
        "warning",
        "taken by a process in another network namespace",
        "ps-server start --port 0",
    ),
    Case(
        ports.judge(CONTROL, "127.0.0.1", errno.EADDRINUSE, Listener(7, "python /usr/bin/ps-server start")),
        "ok",
        "a ps-server has 127.0.0.1:5555: pid 7",
    ),
    Case(
        ports.judge(CONTROL._replace(number=80), "127.0.0.1", errno.EACCES, None),
        "failure",
        "127.0.0.1:80 is for privileged programs",
        "ps-server start --port N, with N from 1024 on",
    ),
    Case(
        ports.judge(CONTROL, "10.0.0.9", errno.EADDRNOTAVAIL, None),
        "failure",
        "10.0.0.9 is no address of this machine",
        "ps-server start --host",
    ),
    Case(
        ports.judge(CONTROL, "10.0.0.9", errno.ENETDOWN, None),
        "failure",
        "10.0.0.9:5555 cannot be had: Network is down",
        "--port 0, or --host",
    ),
    # The server.
    Case(
        peer.judge_connection(ADDR, socket.gaierror(-2, "Name or service not known"), 4),
        "failure",
        "hub1 is the name of no host (Name or service not known)",
        "the server's address in place of its name",
    ),
    Case(
        peer.judge_connection(ADDR, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), 4),
        "failure",
        "nothing listens at hub1:5555: the connection was refused",
        "ps-server start --host hub1 --port 5555",
    ),
    Case(
        peer.judge_connection(ADDR, TimeoutError("timed out"), 4),
        "failure",
        "hub1:5555 did not answer within 4.0 s: it is off, or a firewall drops",
        "open TCP port 5555 there",
    ),
    Case(
        peer.judge_connection(ADDR, OSError(errno.EHOSTUNREACH, "No route to host"), 4),
        "failure",
        "no network leads to hub1:5555: No route to host",
        "ip route get hub1",
    ),
    Case(
        peer.judge_connection(ADDR, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 4),
        "failure",
        "hub1:5555 broke the connection off: Connection reset by peer",
        "ping hub1",
    ),
    Case(
        peer.judge_refusal(ADDR, "UNIMPLEMENTED", "Method not found!", 4),
        "failure",
        "what answers at hub1:5555 speaks gRPC, but is no ps-server",
        "the banner of ps-server start",
    ),
    Case(
        peer.judge_refusal(ADDR, "DEADLINE_EXCEEDED", "", 4),
        "failure",
        "takes connections, but said nothing within 4.0 s",
        "kill -CONT",
    ),
    Case(
        peer.judge_refusal(ADDR, "UNAVAILABLE", "Socket closed", 4),
        "failure",
        "does not speak as a ps-server does (UNAVAILABLE: Socket closed)",
        "the control port's, and not the page's",
    ),
    Case(
        peer.judge_report(ADDR, {"job": "train.py", "state": "waiting for 1 of 2 workers"}),
        "ok",
        "a ps-server answers at hub1:5555; job 'train.py': waiting for 1 of 2 workers",
    ),
    Case(peer.judge_report(ADDR, {}), "ok", "its state is unknown"),
    Case(
        peer.judge_versions(End("1.2.0", 4), End("1.2.0", 4), ADDR), "ok", "hubring 1.2.0 (protocol 4) here"
    ),
    Case(
        peer.judge_versions(End("1.2.0", 4), End("2.0.0", 5), ADDR),
        "failure",
        "here, 2.0.0 (protocol 5) at hub1:5555: it refuses workers of another protocol",
        "here pip install 'hubring==2.0.0', or there 'hubring==1.2.0'",
    ),
    Case(
        peer.judge_versions(End("1.2.0", 4), End(None, None), ADDR),
        "failure",
        "one of unknown version (protocol unknown) at hub1:5555",
        "there 'hubring==1.2.0'",
    ),
    Case(
        peer.judge_versions(End("1.2.0", 4), End("1.3.0", 4), ADDR),
        "warning",
        "they understand each other, but were not tested together",
        "pip install 'hubring==1.3.0' here",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.finding.name}: {case.found}" for case in CASES])
def test_what_is_found_has_its_sentence_and_its_mend(case: Case) -> None:
    assert case.finding.state == case.state, case.finding
    assert case.found in case.finding.found
    assert case.mend in case.finding.mend


def test_every_judgement_is_among_the_cases() -> None:
    """So that no new failure comes without its sentence being read here."""
    states = {(case.finding.name, case.state) for case in CASES}
    assert {name for name, state in states if state == "failure"} >= {
        *(
            "packages",
            "torch",
            "CUDA",
            "CUDA 0",
            "NCCL",
            "Gloo",
            "settings",
            "memory",
            "shared memory",
            "/dev/shm",
        ),
        *("open files", "checkpoint dir", "clock", "own name", "server's name", "interfaces", "control port"),
        *("NCCL_SOCKET_IFNAME", "server", "versions"),
    }
    assert {name for name, state in states if state == "warning"} >= {
        *("torch threads", "cores", "memlock", "clocks", "GLOO_SOCKET_IFNAME"),
    }


def test_a_failure_without_a_mend_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="a mend is due"):
        failure("disk", "it is full", "")
    with pytest.raises(AssertionError, match="too much"):
        Finding("disk", "ok", "40 GiB", mend="buy more")


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([], 0),
        ([ok("a", "well"), skipped("b", "absent"), warning("c", "slow", "wait")], 0),
        ([warning("c", "slow", "wait"), failure("server", "none", "start one", 69)], 69),
        ([failure("server", "none", "start one", 69), failure("disk", "full", "make room")], 78),
    ],
)
def test_a_missing_server_may_come_and_a_failing_machine_stays(findings: list[Finding], code: int) -> None:
    result = verdict.result("hub1:5555", findings)
    assert result["exit_code"] == code
    assert result["failures"] == sum(finding.state == "failure" for finding in findings)
    assert result["warnings"] == sum(finding.state == "warning" for finding in findings)
    assert [set(told) for told in result["findings"]] == [{"name", "state", "found", "mend"}] * len(findings)


def test_every_failure_of_reaching_the_server_ends_with_69() -> None:
    codes = {
        case.finding.exit_code for case in CASES if case.finding.name == "server" and case.state == "failure"
    }
    assert codes == {69}
    assert interfaces.judge_way("hub1", "none").exit_code == 69
    assert names.judge_server(Answer("hub1", [], "unknown"), here=False).exit_code == 69


# Versions.


def test_requirements_leave_out_those_of_extras() -> None:
    lines = ["grpcio>=1.85", "torch>=2.13", "mpi4py>=4; extra == 'bench'"]
    assert packages.requirements(lines) == [Requirement("grpcio", "1.85"), Requirement("torch", "2.13")]


@pytest.mark.parametrize(
    ("version", "least", "met"),
    [
        ("2.13.0+cpu", "2.13", True),
        ("2.9.1", "2.13", False),
        ("3", "2.13", True),
        ("2.14.0a0+git1", "2.13", True),
        ("1.85.0", "1.85.1", False),
        ("unknown", "1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, least: str, met: bool) -> None:
    assert Requirement("torch", least).met_by(version) == met


def test_our_own_package_names_what_it_needs() -> None:
    assert {"torch", "grpcio", "protobuf"} <= {each.name for each in packages.needs()}


# GPUs.


@pytest.mark.parametrize(
    ("capability", "arches", "runs"),
    [
        ((9, 0), ["sm_90"], True),
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((7, 0), ["compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_120"], True),
        ((12, 1), ["sm_120a"], False),
        ((12, 1), ["sm_120f"], True),
        ((9, 0), [], False),
    ],
)
def test_a_build_fits_a_gpu_as_nvidia_says(
    capability: tuple[int, int], arches: list[str], runs: bool
) -> None:
    assert cuda.fits(capability, arches) == runs


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
            "535.129.03",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
            "580.95.05",
        ),
        ("nothing of the kind", None),
    ],
)
def test_the_drivers_version_is_read(text: str, version: str | None) -> None:
    assert cuda.driver_version(text) == version


# The network.

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:15B3 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
   1: 0100007F:15B3 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0
"""


def test_only_who_listens_counts() -> None:
    assert listeners.inodes(TCP, 5555) == ["4711"]
    assert listeners.inodes(TCP, 22) == ["4713"]
    assert listeners.inodes(TCP, 5556) == []


def test_the_process_that_listens_is_found_by_its_open_files(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP)
    (tmp_path / "self").mkdir()
    for pid, target in (("12", "/dev/null"), ("13", "socket:[4711]")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd" / "3").symlink_to(target)
        (tmp_path / pid / "cmdline").write_text("nginx\0-g\0daemon off;\0")
    assert listeners.find(5555, tmp_path) == Listener(13, "nginx -g daemon off;")
    assert listeners.find(22, tmp_path) == Listener(None)
    assert listeners.find(5556, tmp_path) is None


def test_this_process_is_found_where_it_listens_and_refuses_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = listeners.find(port)
        assert ports.refused("127.0.0.1", port) == errno.EADDRINUSE
    assert found is not None
    assert "pytest" in found.command
    assert ports.refused("127.0.0.1", port) == 0
    assert ports.refused("192.0.2.77", 0) == errno.EADDRNOTAVAIL


def test_a_long_command_line_is_cut() -> None:
    assert str(Listener(7, "x" * 100)) == f"pid 7 ({'x' * 60}...)"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ServerConfig(), [5555, 5556]),
        (ServerConfig(port=7000, page_port=8080), [7000, 8080]),
        (ServerConfig(port=0), [0, 0]),
        (ServerConfig(no_page=True), [5555]),
    ],
)
def test_the_ports_are_those_that_a_server_would_take(config: ServerConfig, expected: list[int]) -> None:
    assert [port.number for port in ports.wanted(config)] == expected


def test_gloo_wants_whole_names_and_nccl_prefixes() -> None:
    assert interfaces.gloo_takes("lo,eth0", HERE)
    assert not interfaces.gloo_takes("eth", HERE)
    assert interfaces.nccl_takes("eth,ib", HERE) == ["eth0", "ib0"]
    assert interfaces.nccl_takes("=eth", HERE) == []
    assert interfaces.nccl_takes("^lo,ib", HERE) == ["eth0"]
    assert interfaces.nccl_takes("^=eth0", HERE) == ["lo", "ib0"]


def test_an_address_is_this_machines_only_if_it_can_be_bound() -> None:
    assert names.is_own("127.0.0.1")
    assert not names.is_own("192.0.2.77")


def test_a_name_stands_for_each_address_once() -> None:
    assert names.look_up("127.0.0.1").addresses == ("127.0.0.1",)


# Disk.

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:30 / /saved rw - nfs4 server:/saved rw
31 30 0:31 / /saved/a\\040b rw - tmpfs tmpfs rw
32 27 0:32 / /saved rw - xfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/run", "ext4"), ("/saved/run", "xfs"), ("/saved/a b/c", "tmpfs"), ("/savedly", "ext4")],
)
def test_the_innermost_mount_counts_and_of_those_the_last(folder: str, kind: str) -> None:
    assert disk.mounted(MOUNTS, Path(folder)) == kind


def test_a_folder_that_is_not_there_yet_is_tried_above_and_not_made(tmp_path: Path) -> None:
    found = only([*disk.examine(tmp_path / "not" / "yet")])
    assert str(tmp_path / "not" / "yet") in found.found
    assert found.state != "failure"
    assert [*tmp_path.iterdir()] == []


def test_a_file_in_the_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    found = only([*disk.examine(tmp_path / "taken" / "run")])
    assert (found.state, found.found) == ("failure", f"{tmp_path / 'taken'} is no folder")


def test_the_newest_checkpoint_tells_how_large_the_next_will_be(tmp_path: Path) -> None:
    for name, count in (("000009-step-90", 10), ("000010-step-100", 20), (".writing-7", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard0").write_bytes(bytes(count))
    assert disk._look(tmp_path).newest == 20


# Settings.


def examined(variables: dict[str, str], file: Path | None = None) -> list[Finding]:
    config = subject.settled({}, file, variables)
    return [*environment.examine(subject.Subject(config, file, None, variables, 1.0))]


def test_each_variable_is_judged_by_itself() -> None:
    wrong = examined({"PS_WORKER": "2", "PS_PORT": "ten", "PS_SERVER": "", "PS_MODE": "asp", "HOME": "/"})
    assert [finding.state for finding in wrong] == ["failure"] * 3
    assert [
        word in finding.found
        for finding, word in zip(wrong, ("PS_WORKERS?", "a port from", "is empty"), strict=True)
    ]
    assert "leave PS_WORKER out" in wrong[0].mend


@pytest.mark.parametrize("variables", [{"PS_STALENESS": "3"}, {"PS_BACKEND": "nccl"}])
def test_settings_that_contradict_each_other_are_a_warning_as_flags_may_mend_it(
    variables: dict[str, str],
) -> None:
    assert only(examined(variables)).state == "warning"


@pytest.mark.parametrize(
    "variables", [{}, {"PS_TOPOLOGY": "ring"}, {"PS_SERVER": "hub1:5555", "PS_WORLD_SIZE": "4"}]
)
def test_a_worker_is_taken_to_have_a_server(variables: dict[str, str]) -> None:
    assert only(examined(variables)).state == "ok"


def test_a_file_that_is_wrong_is_told_and_the_rest_is_looked_at_with_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[server]\nprot = 7000\n")
    told = only(examined({}, file))
    assert told.state == "failure"
    assert "did you mean port?" in told.found
    assert subject.settled({}, file, {}).port == 5555


def test_settings_are_those_that_a_server_would_find(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[server]\nport = 7000\n")
    config = subject.settled({"checkpoint_dir": tmp_path}, file, {"PS_PAGE_PORT": "8000"})
    assert (config.port, config.page_port, config.checkpoint_dir) == (7000, 8000, tmp_path)
    with pytest.raises(ConfigError, match="--port 70000"):
        subject.settled({"port": 70000}, None, {})


def test_the_ring_of_a_server_here_meets_here() -> None:
    here = subject.Subject(ServerConfig(), None, None, {}, 1.0)
    assert here.ring_address == "127.0.0.1"
    assert here._replace(server="localhost:5555").ring_address == "localhost"
    with pytest.raises(ConfigError, match="no address of this machine leads to"):
        _ = here._replace(server="255.255.255.255:5555").ring_address


# What people see.


def test_lines_show_each_mend_below_what_it_mends() -> None:
    findings = [
        ok("torch", "2.13"),
        failure("checkpoint dir", "[full]", "make room"),
        skipped("NCCL", "no GPU"),
    ]
    assert screen.lines(findings) == [
        "ok       torch           2.13",
        "failure  checkpoint dir  [full]",
        "                         mend: make room",
        "skipped  NCCL            no GPU",
    ]
    assert screen.summary(findings) == "1 failure, 0 warnings; 1 ok, 1 skipped"


def test_without_a_terminal_a_finding_is_a_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    screen.show([warning("a", "b" * 300, "c" * 300)])
    told = capsys.readouterr()
    assert told.out == ""
    assert [len(line) for line in told.err.splitlines()[:2]] == [7 + 2 + 1 + 2 + 300, 7 + 2 + 1 + 2 + 6 + 300]


def test_on_a_terminal_there_is_a_table_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    screen.show([failure("disk", "[full] " + "word " * 40, "make room"), ok("torch", "2.13")])
    told = capsys.readouterr().err
    assert "[full]" in told
    assert "make room" in told
    assert "\x1b[" in told


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (64 * MIB, "64 MiB"),
        (1.5 * GIB, "1.5 GiB"),
        (1000 * MIB, "1000 MiB"),
    ],
)
def test_bytes_are_spelt_in_the_largest_unit(nbytes: float, text: str) -> None:
    assert spelt(nbytes) == text
