"""A switch in user space, in which frames take their time: for kernels without netem.

It stands where the bridge stands otherwise: every port is the switch's end of a host's link. What a
host sends is read from its port, waits in its wire, and is written to the port of whom it is for. These
are frames, so whatever the hosts say to each other, by whichever library, is delayed and not touched:
handshakes and acknowledgements too, and TCP is as slow to find its pace as it is at that distance.

Frames are read as the host made them, up to 64 KiB before they are cut for the wire, with what the
cutting takes in front (PACKET_VNET_HDR): that is what makes it fast enough in Python. Rates are tbf's
affair, in the hosts and behind the ports; what finds no room is dropped, as by any switch, and TCP sends
it anew.

It runs as a process of its own, in the switch's namespace, until its standard input ends:

    python -m hubring.workers.compare.hardship.relay LATENCY JITTER PORT...
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from subprocess import PIPE

from hubring.ps.core.errors import HubringError
from hubring.ps.process.child import Child
from hubring.ps.process.command import module_command
from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.hardship.slow_wire import Wire

HELD_BYTES = 64 << 20
"""What may be on its way from one host; beyond it no more is read, and the port's own buffer fills."""

BUFFER_BYTES = 32 << 20
"""Of a port, each way: what may arrive while the relay is busy, and more than tbf lets stand in line."""

_FRAME_BYTES = 10 + 14 + (1 << 16)
_NO_ROOM = {errno.EAGAIN, errno.ENOBUFS}
"""The socket's buffer is full, or tbf's queue is."""

_BATCH = 16
"""Frames read from one port before the others are looked at."""

# From linux/if_packet.h, linux/if_ether.h and asm-generic/socket.h: Python has no names for them.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_TO, _FROM = slice(10, 16), slice(16, 22)
"""The addresses in a frame, behind the ten bytes of its virtio_net_hdr."""


class Port:
    """The switch's end of one host's link, and what that host has sent and nobody has got yet."""

    def __init__(self, name: str, link: Link) -> None:
        self.wire = Wire(link, name)
        self.dropped = 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, BUFFER_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.bind((name, _ETH_P_ALL))

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def read(self) -> bytes | None:
        """The host's next frame, if one is there."""
        try:
            return self._socket.recv(_FRAME_BYTES)
        except BlockingIOError:
            return None

    def write(self, frame: bytes) -> None:
        """Sends a frame to the host, or drops it where there is no room."""
        try:
            self._socket.send(frame)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self.dropped += 1


class Switch:
    """Brings frames from port to port."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = ports
        self._behind: dict[bytes, Port] = {}
        """Which address was seen behind which port."""

    def run(self, end: int) -> None:
        """Forwards until the file descriptor `end` has something to read."""
        while True:
            reading = [port for port in self._ports if port.wire.nbytes < HELD_BYTES]
            ready, _, _ = select.select([end, *map(Port.fileno, reading)], [], [], self._until_due())
            if end in ready:
                return
            for port in reading:
                if port.fileno() in ready:
                    self._read(port)
            for port in self._ports:
                for frame in port.wire.take(time.monotonic()):
                    self._deliver(frame, port)

    def _until_due(self) -> float | None:
        due = min(port.wire.due for port in self._ports)
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _read(self, port: Port) -> None:
        for _ in range(_BATCH):
            if (frame := port.read()) is None:
                return
            self._behind[frame[_FROM]] = port
            port.wire.put(frame, time.monotonic())

    def _deliver(self, frame: bytes, source: Port) -> None:
        """To whom it is for; to all others where that is everybody, or somebody unseen."""
        target = self._behind.get(frame[_TO])
        for port in self._ports if target is None else (target,):
            if port is not source:
                port.write(frame)


@contextlib.contextmanager
def relay(within: Sequence[str], link: Link, ports: Sequence[str]) -> Iterator[None]:
    """Runs a switch of these ports.

    Args:
        within: What goes before a command to run it in the switch's namespace.
        link: Whose latency and jitter every frame meets once.
        ports: Names of the devices.

    Raises:
        HubringError: It failed, at the start or on the way; shows what it said.
    """
    words = [repr(link.latency), repr(link.jitter), *ports]
    command = [*within, *module_command(__name__, *words)]
    # In a session of its own: Ctrl-C ends the programs on the hosts first.
    child = Child("the relay", command, stdin=PIPE, stdout=PIPE, stderr=PIPE, session=True)
    with child.stdout, child.stderr:
        try:
            if child.stdout.readline():
                yield
        finally:
            child.ask_to_stop()
            said = child.stderr.read().decode(errors="replace")
            child.wait()
    if child.code:
        raise HubringError(f"the relay between the hosts {child.ended}:\n{said}")


def main(latency: str, jitter: str, *names: str) -> None:
    """Forwards until standard input ends; says so when it begins, and at the end what it dropped."""
    with contextlib.suppress(PermissionError):  # it is only less punctual then
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    ports = [Port(name, Link(latency=float(latency), jitter=float(jitter))) for name in names]
    print("forwarding", flush=True)
    Switch(ports).run(sys.stdin.fileno())
    print(json.dumps({"dropped": {name: port.dropped for name, port in zip(names, ports, strict=True)}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
