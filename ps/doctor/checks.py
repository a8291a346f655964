"""All checks, in display order: software, machine, network, server."""

from __future__ import annotations

from functools import partial

from hubring.ps.doctor import certificate, collectives, disk, gpu, machine, network, server, software
from hubring.ps.doctor.isolation import Check
from hubring.ps.doctor.subject import Subject, outside

_RESOLVER = "remove name servers that do not answer from /etc/resolv.conf, or add the name to /etc/hosts"


def checks(subject: Subject) -> list[Check]:
    """Returns the checks of this machine, and of the server if there is one."""
    return [*_software(subject), *_machine(subject), *_network(subject), *_server(subject)]


def _software(subject: Subject) -> list[Check]:
    on_torch = [
        Check(
            gpu.CUDA,
            partial(gpu.examine, subject.variables),
            "run nvidia-smi; if it fails too, the driver is broken: restart the machine, or train on the CPU"
            f" with {gpu.VISIBLE}=",
        ),
        Check(collectives.NCCL, collectives.examine_nccl, collectives.NCCL_FIX),
        Check(
            collectives.GLOO,
            partial(collectives.examine_gloo, subject),
            "check ip addr and iptables -L; until it is fixed, do not use --topology ring",
        ),
    ]
    return [
        Check(
            software.PACKAGES,
            software.examine_packages,
            "install Hubring again: pip install --force-reinstall . in its clone",
        ),
        Check(
            software.TORCH,
            partial(software.examine_torch, on_torch, subject.seconds),
            "pip install --force-reinstall torch; python -c 'import torch' shows the error",
            further=tuple(check.name for check in on_torch),
        ),
        Check(
            software.SETTINGS,
            partial(software.examine_settings, subject),
            "list the variables with env | grep ^PS_, and unset the wrong ones",
        ),
    ]


def _machine(subject: Subject) -> list[Check]:
    shm = machine.SHM
    return [
        Check(
            machine.CORES,
            partial(machine.examine_cores, subject.variables),
            "check nproc and cat /proc/self/cgroup",
        ),
        Check(machine.MEMORY, machine.examine_memory, "check free -m and cat /proc/self/cgroup"),
        Check(
            machine.SHARED,
            machine.examine_shared,
            f"check ls -ld {shm} and mount | grep {shm}",
            further=(shm,),
        ),
        Check(machine.FILES, machine.examine_limits, "check ulimit -a", further=(machine.MEMLOCK,)),
        Check(
            disk.NAME,
            partial(disk.examine, subject.config.checkpoint_dir),
            "the disk or file server does not answer: check mount and dmesg, or use another --checkpoint-dir",
        ),
        Check(machine.CLOCK, machine.examine_clock, "check timedatectl"),
    ]


def _network(subject: Subject) -> list[Check]:
    here = outside()
    return [
        Check(network.OWN_NAME, partial(network.examine_own_name, here), _RESOLVER),
        Check(network.INTERFACES, partial(network.examine_interfaces, subject, here), _RESOLVER),
        Check(
            certificate.NAME, partial(certificate.examine, subject), "check --tls-cert, --tls-key, --tls-ca"
        ),
        Check(network.CONTROL_PORT, partial(network.examine_ports, subject.config), "check ss -ltnp"),
    ]


def _server(subject: Subject) -> list[Check]:
    if subject.server is None:
        return []
    return [
        Check(network.SERVER_NAME, partial(network.examine_server_name, subject.server_host), _RESOLVER),
        Check(
            server.SERVER,
            partial(server.examine, subject.server, subject.config, subject.seconds),
            f"run ps-server status {subject.server}",
            further=(server.VERSIONS, server.CLOCKS),
        ),
    ]
