"""Every sentence of the doctor, without breaking a machine: what is found, how bad it is, and the mend."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from hubring.ps.core.offset import Offset
from hubring.ps.doctor import (
    clock,
    cuda,
    disk,
    environment,
    gloo,
    interfaces,
    limits,
    memory,
    names,
    nccl,
    packages,
    peer,
    ports,
    processors,
    shared_memory,
    torch_build,
    verdict,
)
from hubring.ps.doctor.cgroup import Memory
from hubring.ps.doctor.cuda import Cuda, Gpu
from hubring.ps.doctor.disk import Disk
from hubring.ps.doctor.finding import Finding, State, failure, ok, skipped, warning
from hubring.ps.doctor.listeners import Listener
from hubring.ps.doctor.names import Answer
from hubring.ps.doctor.nccl import Nccl
from hubring.ps.doctor.packages import Requirement
from hubring.ps.doctor.peer import End
from hubring.ps.doctor.ports import Port
from hubring.ps.doctor.sizes import GIB, MIB
from hubring.ps.doctor.torch_build import Build

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
        disk.judge(DIR._replace(refusal=errno.EACCES, tried=DIR.folder)),
        "failure",
        "/saved/run may not be written by",
        "chown -R",
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.EACCES)),
        "failure",
        "/saved may not be written by",
        "install -d -o",
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
    Case(names.judge_server(Answer("::1", ["::1"]), here=True), "ok", "::1 is an address"),
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
