"""All checks, in the order in which they are told: what programs need, the machine, the server."""

from __future__ import annotations

from functools import partial

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
)
from hubring.ps.doctor.check import Check
from hubring.ps.doctor.subject import Subject, outside


def checks(subject: Subject) -> list[Check]:
    """Those for this machine, and for the server if one is named."""
    return [*_programs(subject), *_machine(subject), *_network(subject), *_server(subject)]


def _programs(subject: Subject) -> list[Check]:
    on_torch = [
        Check(
            cuda.NAME,
            partial(cuda.examine, subject.variables),
            "nvidia-smi; if that fails too, it is the driver: restart the machine, or train on the CPU with"
            f" {cuda.VISIBLE}=",
        ),
        Check(
            nccl.NAME,
            nccl.examine,
            "NCCL_DEBUG=INFO before ps-worker tells why; until then ps-worker --backend gloo",
        ),
        Check(
            gloo.NAME, partial(gloo.examine, subject), "ip addr; iptables -L; until then no --topology ring"
        ),
    ]
    return [
        Check(
            packages.NAME,
            packages.examine,
            f"pip install --upgrade --force-reinstall {packages.OURS}",
        ),
        Check(
            packages.TORCH,
            partial(torch_build.examine, on_torch, subject.seconds),
            "pip install --force-reinstall torch; python -c 'import torch' shows what it says",
            further=tuple(check.name for check in on_torch),
        ),
        Check(
            environment.NAME,
            partial(environment.examine, subject),
            "env | grep ^PS_, and unset what is odd",
        ),
    ]


def _machine(subject: Subject) -> list[Check]:
    return [
        Check(
            processors.NAME,
            partial(processors.examine, subject.variables),
            "nproc; cat /proc/self/cgroup",
        ),
        Check(memory.NAME, memory.examine, "free -m; cat /proc/self/cgroup"),
        Check(
            shared_memory.OURS,
            shared_memory.examine,
            f"ls -ld {shared_memory.SHM}; mount | grep {shared_memory.SHM}",
            further=(shared_memory.SHM,),
        ),
        Check(limits.FILES, limits.examine, "ulimit -a", further=(limits.MEMLOCK,)),
        Check(
            disk.NAME,
            partial(disk.examine, subject.config.checkpoint_dir),
            "its disk, or the server that has it, does not answer: mount, dmesg; or another --checkpoint-dir",
        ),
        Check(clock.NAME, clock.examine, "timedatectl"),
    ]


def _network(subject: Subject) -> list[Check]:
    return [
        Check(names.OWN, partial(names.examine_own, outside()), _RESOLVER),
        Check(interfaces.NAME, partial(interfaces.examine, subject, outside()), _RESOLVER),
        Check("control port", partial(ports.examine, subject.config), "ss -ltnp"),
    ]


def _server(subject: Subject) -> list[Check]:
    if subject.server is None:
        return []
    return [
        Check(names.SERVER, partial(names.examine_server, subject.server_host), _RESOLVER),
        Check(
            peer.SERVER,
            partial(peer.examine, subject.server, subject.seconds),
            f"ps-server status {subject.server}",
            further=(peer.VERSIONS, peer.CLOCKS),
        ),
    ]


_RESOLVER = "take name servers that do not answer out of /etc/resolv.conf, or put the name into /etc/hosts"
