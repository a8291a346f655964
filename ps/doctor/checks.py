"""All checks, in the order in which they are shown: what programs need, the machine, the server."""

from __future__ import annotations

from functools import partial

from hubring.ps.doctor import collectives, disk, gpu, machine, network, server, software
from hubring.ps.doctor.isolation import Check
from hubring.ps.doctor.subject import Subject, outside

_RESOLVER = "take name servers that do not answer out of /etc/resolv.conf, or put the name into /etc/hosts"


def checks(subject: Subject) -> list[Check]:
    """The checks of this machine, and of the server if one was given."""
    return [*_software(subject), *_machine(subject), *_network(subject), *_server(subject)]


def _software(subject: Subject) -> list[Check]:
    on_torch = [
        Check(
            gpu.CUDA,
            partial(gpu.examine, subject.variables),
            "nvidia-smi; if that fails too, it is the driver: restart the machine, or train on the CPU with"
            f" {gpu.VISIBLE}=",
        ),
        Check(collectives.NCCL, collectives.examine_nccl, collectives.NCCL_MEND),
        Check(
            collectives.GLOO,
            partial(collectives.examine_gloo, subject),
            "ip addr; iptables -L; until then no --topology ring",
        ),
    ]
    return [
        Check(
            software.PACKAGES,
            software.examine_packages,
            f"pip install --upgrade --force-reinstall {software.OURS}",
        ),
        Check(
            software.TORCH,
            partial(software.examine_torch, on_torch, subject.seconds),
            "pip install --force-reinstall torch; python -c 'import torch' shows what it says",
            further=tuple(check.name for check in on_torch),
        ),
        Check(
            software.SETTINGS,
            partial(software.examine_settings, subject),
            "env | grep ^PS_, and unset what is odd",
        ),
    ]


def _machine(subject: Subject) -> list[Check]:
    shm = machine.SHM
    return [
        Check(
            machine.CORES, partial(machine.examine_cores, subject.variables), "nproc; cat /proc/self/cgroup"
        ),
        Check(machine.MEMORY, machine.examine_memory, "free -m; cat /proc/self/cgroup"),
        Check(machine.SHARED, machine.examine_shared, f"ls -ld {shm}; mount | grep {shm}", further=(shm,)),
        Check(machine.FILES, machine.examine_limits, "ulimit -a", further=(machine.MEMLOCK,)),
        Check(
            disk.NAME,
            partial(disk.examine, subject.config.checkpoint_dir),
            "its disk, or the server that has it, does not answer: mount, dmesg; or another --checkpoint-dir",
        ),
        Check(machine.CLOCK, machine.examine_clock, "timedatectl"),
    ]


def _network(subject: Subject) -> list[Check]:
    here = outside()
    return [
        Check(network.OWN_NAME, partial(network.examine_own_name, here), _RESOLVER),
        Check(network.INTERFACES, partial(network.examine_interfaces, subject, here), _RESOLVER),
        Check(network.CONTROL_PORT, partial(network.examine_ports, subject.config), "ss -ltnp"),
    ]


def _server(subject: Subject) -> list[Check]:
    if subject.server is None:
        return []
    return [
        Check(network.SERVER_NAME, partial(network.examine_server_name, subject.server_host), _RESOLVER),
        Check(
            server.SERVER,
            partial(server.examine, subject.server, subject.seconds),
            f"ps-server status {subject.server}",
            further=(server.VERSIONS, server.CLOCKS),
        ),
    ]
