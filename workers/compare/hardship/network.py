"""Hosts on one machine with links of a given kind: network namespaces, veth pairs, a switch, tbf.

The switch is the kernel's bridge, or a relay if the links have latency. It has its own namespace, so this
machine's network does not change. Needs root.
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
"""Burst of a link: two packets of the largest size before segmentation."""

QUEUE_BYTES = 64 << 20
"""Queue of a link. It holds everything that the senders' buffers allow in flight, so no packet is dropped.

A packet lost at the end of a step costs TCP's timeout of 200 ms, a property of TCP and not of hub or ring.
"""

CONGESTION_CONTROL = "cubic"
"""Linux's default, whatever this machine is set to."""

LINE_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full frame as tbf counts it, and its TCP payload with timestamps."""

MOST_HOSTS = 250
"""Fewer than the addresses of one network."""

_NAMES = re.compile(r"hubring-(\d+)-\d+-\w+")
_count = itertools.count()


class NetworkFailed(HubringError):
    """A network cannot be built; the message shows the error of `ip` or `tc`."""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with its address for the others."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Returns the command that runs a program there, in the started process itself."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def traffic(self) -> tuple[int, int]:
        """Returns bytes received and sent over its link, with protocol headers."""
        shown = _call(*self.command("ip", "-json", "-stats", "link", "show", "eth0"))
        stats = json.loads(shown)[0]["stats64"]
        return stats["rx"]["bytes"], stats["tx"]["bytes"]


@contextlib.contextmanager
def network(hosts: int, link: Link) -> Iterator[list[Host]]:
    """Provides hosts on one switch, each with such a link.

    The rate is that of a host's link, each way. Latency and jitter apply once between two hosts.

    Raises:
        UsageError: There are more hosts than addresses.
        NetworkFailed: Namespaces or links cannot be created; check with `why_not` first.
        HubringError: The relay failed.
    """
    if hosts > MOST_HOSTS:
        raise UsageError(f"{hosts} hosts on one switch; expected at most {MOST_HOSTS}")
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
    """Returns why no network with such links can be built here; empty if it can.

    Args:
        link: None: a link with a rate and no latency.
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
        return f"this machine cannot build network namespaces with such links: {error}"


def _add(host: Host, stack: contextlib.ExitStack) -> None:
    _call("ip", "netns", "add", host.name)
    stack.callback(_call, "ip", "netns", "delete", host.name)  # also deletes its ends of the links
    _call("ip", "-n", host.name, "link", "set", "lo", "up")


def _plug(host: Host, switch: Host, port: str, link: Link) -> None:
    """Connects a host to the switch; both ends of the link limit what they send."""
    veth = ["type", "veth", "peer", "name", "eth0", "netns", host.name]
    _call("ip", "-n", switch.name, "link", "add", port, *veth)
    _call("ip", "-n", switch.name, "link", "set", port, "up")
    _call("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    _call("ip", "-n", host.name, "link", "set", "eth0", "up")
    route = ["10.77.0.0/24", "dev", "eth0", "congctl", CONGESTION_CONTROL]
    _call("ip", "-n", host.name, "route", "replace", *route)
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
    """Deletes the networks of killed programs, which could not clean up."""
    made = Path("/run/netns")
    for name in [entry.name for entry in made.iterdir()] if made.is_dir() else []:
        found = _NAMES.fullmatch(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            try:
                _call("ip", "netns", "delete", name)
            except NetworkFailed:
                if (made / name).exists():  # else another program deleted it at the same time
                    raise


def _call(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as cause:
        raise NetworkFailed(f"no program {command[0]!r} on this host; install iproute2") from cause
    except subprocess.CalledProcessError as cause:
        raise NetworkFailed(f"`{' '.join(command)}` failed: {cause.stderr.strip()}") from cause
