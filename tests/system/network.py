"""Hosts on one machine, joined by links of a given rate: network namespaces, veth pairs, a bridge, tbf.

Needs root. The bridge lies in a namespace of its own, so this machine's network is not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

BURST_BYTES = 128 << 10
"""What a link may let through at once; two packets at their largest before they are cut for the wire."""

QUEUE = "100ms"
"""How long what is sent may stand in line: room for all that the receivers' buffers let be under way."""

CONGESTION_CONTROL = "cubic"
"""Linux's own choice, whatever this machine was told."""

LINE_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full frame as tbf counts it, and what of it TCP carries for its user, with timestamps."""

_RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    lines, room = [server.accept()[0] for _ in range(int(sys.argv[2]))], bytearray(1 << 20)
    began, total = time.perf_counter(), 0
    while lines:
        for line in list(lines):
            got = line.recv_into(room)
            total += got
            if not got:
                lines.remove(line)
    print(total / (time.perf_counter() - began), flush=True)
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as line:
    line.sendall(bytes(int(sys.argv[3])))
"""


@dataclass(frozen=True)
class Host:
    """One namespace, and the address under which the others reach it."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """What runs a program there."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def traffic(self) -> tuple[int, int]:
        """Bytes that its link has brought and taken, with all that the protocols add."""
        shown = subprocess.check_output(self.command("ip", "-json", "-stats", "link", "show", "eth0"))
        stats = json.loads(shown)[0]["stats64"]
        return stats["rx"]["bytes"], stats["tx"]["bytes"]


@contextlib.contextmanager
def network(hosts: int, rate: str) -> Iterator[list[Host]]:
    """So many hosts on one switch; each one's link carries `rate` (as tc spells it) each way."""
    prefix = f"hubring{os.getpid()}"
    switch = f"{prefix}-switch"
    members = [Host(f"{prefix}-{number}", f"10.77.0.{number + 1}") for number in range(hosts)]
    with contextlib.ExitStack() as stack:
        _add(switch, stack)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(members):
            _add(host.name, stack)
            _plug(host, switch, f"port{number}", rate)
        yield members


def why_not() -> str:
    """Why no network can be built here; empty if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(1, "1gbit"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces with tbf here: {error}"


def plain_goodput(receiver: Host, senders: list[Host], nbytes: int) -> float:
    """Bytes a second that plain sockets bring to one host from others, each of which sends `nbytes`."""
    command = receiver.command(sys.executable, "-c", _RECEIVE, receiver.address, str(len(senders)))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reading:
        assert reading.stdout is not None
        port = reading.stdout.readline().strip()
        sending = [
            subprocess.Popen(host.command(sys.executable, "-c", _SEND, receiver.address, port, str(nbytes)))
            for host in senders
        ]
        assert [each.wait() for each in sending] == [0] * len(senders)
        return float(reading.stdout.readline())


def _add(name: str, stack: contextlib.ExitStack) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)  # with it go its ends of the links
    _ip("-n", name, "link", "set", "lo", "up")


def _plug(host: Host, switch: str, port: str, rate: str) -> None:
    """Joins a host to the switch; either end of the link lets no more than `rate` out."""
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.name, "link", "set", "eth0", "up")
    way = ["10.77.0.0/24", "dev", "eth0", "congctl", CONGESTION_CONTROL]
    _ip("-n", host.name, "route", "replace", *way)
    for name, device in ((host.name, "eth0"), (switch, port)):
        shaper = ["root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", QUEUE]
        _call("tc", "-n", name, "qdisc", "add", "dev", device, *shaper)


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
