"""Hosts on one machine, joined by links of a given kind: network namespaces, veth pairs, a switch, tbf.

The switch is the kernel's bridge, or where the links take their time a relay. It lies in a namespace of
its own, so this machine's network is not touched. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hubring.ps.core.errors import HubringError, UsageError
from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.hardship.relay import relay

BURST_BYTES = 128 << 10
"""What a link may let through at once; two packets at their largest before they are cut for the wire."""

QUEUE_BYTES = 64 << 20
"""What may stand in line: all that the senders' buffers let be under way, so that nothing is dropped.

A packet lost at a step's end costs TCP's timeout, 200 ms, which tells of TCP and not of hub or ring.
"""

CONGESTION_CONTROL = "cubic"
"""Linux's own choice, whatever this machine was told."""

LINE_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full frame as tbf counts it, and what of it TCP carries for its user, with timestamps."""

MOST_HOSTS = 250
"""Addresses of one network, and some to spare."""

_NAMES = re.compile(r"hubring-(\d+)-\d+-\w+")
_count = itertools.count()


class NetworkFailed(HubringError):
    """A network cannot be built; the message shows what `ip` or `tc` said."""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace, and the address under which the others reach it."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """What runs a program there, as the process that was started and no child of it."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def traffic(self) -> tuple[int, int]:
        """Bytes that its link has brought and taken, with all that the protocols add."""
        shown = _call(*self.command("ip", "-json", "-stats", "link", "show", "eth0"))
        stats = json.loads(shown)[0]["stats64"]
        return stats["rx"]["bytes"], stats["tx"]["bytes"]


@contextlib.contextmanager
def network(hosts: int, link: Link) -> Iterator[list[Host]]:
    """So many hosts on one switch, each joined to it by such a link.

    A link's rate is the host's, each way; its latency and jitter are met once on the way from host to host.

    Raises:
        UsageError: More hosts than a network has addresses for.
        NetworkFailed: Namespaces or links could not be made; `why_not` says so beforehand.
        HubringError: The relay failed.
    """
    if hosts > MOST_HOSTS:
        raise UsageError(f"{hosts} hosts behind one switch; {MOST_HOSTS} are the most")
    _sweep()
    prefix = f"hubring-{os.getpid()}-{next(_count)}"
    switch = Host(f"{prefix}-switch", "")
    members = [Host(f"{prefix}-{number}", f"10.77.0.{number + 1}") for number in range(hosts)]
    ports = [f"port{number}" for number in range(hosts)]
    with contextlib.ExitStack() as stack:
        _add(switch, stack)
        for host, port in zip(members, ports, strict=True):
            _add(host, stack)
            _plug(host, switch, port, link)
        if link.latency:
            stack.enter_context(relay(switch.command(), link, ports))
        else:
            _bridge(switch, ports)
        yield members


def why_not(link: Link | None = None) -> str:
    """Why no network of such links can be built here; empty if one can.

    Args:
        link: None: one with a rate, and at once.
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    return _tried(link or Link(rate=1e9))


@cache
def _tried(link: Link) -> str:
    try:
        with network(1, link):
            return ""
    except HubringError as error:
        return f"no network namespaces with such links here: {error}"


def _add(host: Host, stack: contextlib.ExitStack) -> None:
    _call("ip", "netns", "add", host.name)
    stack.callback(_call, "ip", "netns", "delete", host.name)  # with it go its ends of the links
    _call("ip", "-n", host.name, "link", "set", "lo", "up")


def _plug(host: Host, switch: Host, port: str, link: Link) -> None:
    """Joins a host to the switch; either end of the link lets no more than its rate out."""
    veth = ["type", "veth", "peer", "name", "eth0", "netns", host.name]
    _call("ip", "-n", switch.name, "link", "add", port, *veth)
    _call("ip", "-n", switch.name, "link", "set", port, "up")
    _call("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    _call("ip", "-n", host.name, "link", "set", "eth0", "up")
    way = ["10.77.0.0/24", "dev", "eth0", "congctl", CONGESTION_CONTROL]
    _call("ip", "-n", host.name, "route", "replace", *way)
    if link.rate is not None:
        bucket = ["rate", f"{link.rate:.0f}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
        for name, device in ((host.name, "eth0"), (switch.name, port)):
            _call("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def _bridge(switch: Host, ports: list[str]) -> None:
    _call("ip", "-n", switch.name, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-n", switch.name, "link", "set", "bridge", "up")
    for port in ports:
        _call("ip", "-n", switch.name, "link", "set", port, "master", "bridge")


def _sweep() -> None:
    """Deletes the networks of programs that were killed and could not do so themselves."""
    made = Path("/run/netns")
    for name in [entry.name for entry in made.iterdir()] if made.is_dir() else []:
        found = _NAMES.fullmatch(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            try:
                _call("ip", "netns", "delete", name)
            except NetworkFailed:
                if (made / name).exists():  # else another program has swept here at the same time
                    raise


def _call(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as cause:
        raise NetworkFailed(f"there is no program {command[0]!r} here; it comes with iproute2") from cause
    except subprocess.CalledProcessError as cause:
        raise NetworkFailed(f"`{' '.join(command)}` failed: {cause.stderr.strip()}") from cause
