"""A switch in user space that delays frames, for kernels without netem.

Law: a frame leaves `latency` seconds after it entered, plus or minus up to `jitter`, and never before an
earlier frame. So a frame with a long delay holds up those close behind it, like a queue in a network.

It replaces the bridge: every port is the switch's end of a host's link. A frame is read from its host's port,
waits in that host's wire, and is written to the port of its destination. The relay delays frames and does not
change them, so all protocols and libraries work. Handshakes and acknowledgements are delayed too, so TCP
adapts as slowly as at that distance.

Frames are read before segmentation, up to 64 KiB, with the header that segmentation needs (PACKET_VNET_HDR).
That makes Python fast enough. tbf limits the rates, in the hosts and behind the ports. Frames that find no
room are dropped, as by any switch, and TCP resends them.

It runs as a separate process in the switch's namespace until its standard input ends:

    python -m hubring.workers.compare.run.relay LATENCY JITTER PORT...
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from random import Random
from subprocess import PIPE

from hubring.ps.core.errors import HubringError
from hubring.ps.process.child import Child
from hubring.ps.process.launch import module_command
from hubring.workers.compare.plan.setting import Link


class SlowWire:
    """Frames in flight from one host.

    Args:
        link: Link of the host; its rate is ignored.
        seed: Seed of the jitter.

    Attributes:
        nbytes: Bytes in flight.
    """

    def __init__(self, link: Link, seed: str) -> None:
        self.nbytes = 0
        self._latency, self._jitter = link.latency, link.jitter
        self._random = Random(seed)  # noqa: S311 - no secret
        self._frames: deque[tuple[float, bytes]] = deque()
        self._last = 0.0

    @property
    def due(self) -> float:
        """Time at which the next frame leaves; infinity if there is none."""
        return self._frames[0][0] if self._frames else float("inf")

    def put(self, frame: bytes, now: float) -> None:
        """Adds a frame."""
        delay = self._latency
        if self._jitter:
            delay += self._random.uniform(-self._jitter, self._jitter)
        self._last = max(self._last, now + delay)
        self._frames.append((self._last, frame))
        self.nbytes += len(frame)

    def take(self, now: float) -> Iterator[bytes]:
        """Yields the frames that have left by `now`, in the order in which they entered."""
        while self._frames and self._frames[0][0] <= now:
            frame = self._frames.popleft()[1]
            self.nbytes -= len(frame)
            yield frame


HELD_BYTES = 64 << 20
"""Most bytes in flight from one host. Beyond that nothing is read, and the port's buffer fills."""

BUFFER_BYTES = 32 << 20
"""Buffer of a port, each way: for frames that arrive while the relay is busy; larger than tbf's queue."""

_FRAME_BYTES = 10 + 14 + (1 << 16)
_NO_ROOM = {errno.EAGAIN, errno.ENOBUFS}
"""Errors if the socket's buffer or tbf's queue is full."""

_BATCH = 16
"""Frames to read from one port before the next port."""

# From linux/if_packet.h, linux/if_ether.h and asm-generic/socket.h, because Python does not define them.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_TO, _FROM = slice(10, 16), slice(16, 22)
"""The addresses in a frame, after the ten bytes of its virtio_net_hdr."""


class RelayPort:
    """The switch's end of one host's link, with the host's frames in flight."""

    def __init__(self, name: str, link: Link) -> None:
        self.wire = SlowWire(link, name)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, BUFFER_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.bind((name, _ETH_P_ALL))

    def fileno(self) -> int:
        """Returns the file descriptor, for `select`."""
        return self._socket.fileno()

    def read(self) -> bytes | None:
        """Returns the host's next frame; None if there is none."""
        try:
            return self._socket.recv(_FRAME_BYTES)
        except BlockingIOError:
            return None

    def write(self, frame: bytes) -> None:
        """Sends a frame to the host; drops it if there is no room."""
        try:
            self._socket.send(frame)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise


class Switch:
    """Forwards frames between ports."""

    def __init__(self, ports: Sequence[RelayPort]) -> None:
        self._ports = ports
        self._behind: dict[bytes, RelayPort] = {}
        """Port by address, as learned from the frames of each port."""

    def run(self, end: int) -> None:
        """Forwards until the file descriptor `end` is readable."""
        while True:
            reading = [port for port in self._ports if port.wire.nbytes < HELD_BYTES]
            ready, _, _ = select.select([end, *map(RelayPort.fileno, reading)], [], [], self._until_due())
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

    def _read(self, port: RelayPort) -> None:
        for _ in range(_BATCH):
            if (frame := port.read()) is None:
                return
            self._behind[frame[_FROM]] = port
            port.wire.put(frame, time.monotonic())

    def _deliver(self, frame: bytes, source: RelayPort) -> None:
        """Sends to the destination's port; to all other ports for broadcasts and unknown destinations."""
        target = self._behind.get(frame[_TO])
        for port in self._ports if target is None else (target,):
            if port is not source:
                port.write(frame)


@contextlib.contextmanager
def relay(within: Sequence[str], link: Link, ports: Sequence[str]) -> Iterator[None]:
    """Runs a switch with these ports during the block.

    Args:
        within: Prefix of a command to run it in the switch's namespace.
        link: Link with the latency and jitter of every frame.
        ports: Names of the devices.

    Raises:
        HubringError: The relay failed, at the start or later; shows its error output.
    """
    words = [repr(link.latency), repr(link.jitter), *ports]
    command = [*within, *module_command(__name__, *words)]
    # In its own session, because on Ctrl-C the programs on the hosts must end first.
    child = Child("the relay", command, stdin=PIPE, stdout=PIPE, stderr=PIPE, session=True)
    with child.stdout, child.stderr:
        try:
            if child.stdout.readline():
                yield
        finally:
            child.ask_to_stop()
            errors = child.stderr.read().decode(errors="replace")
            child.wait()
    if child.code:
        raise HubringError(f"the relay between the hosts {child.ended}:\n{errors}")


def main(latency: str, jitter: str, *names: str) -> None:
    """Forwards until standard input ends. Prints a line at the start."""
    with contextlib.suppress(PermissionError):  # then its timing is less accurate
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    ports = [RelayPort(name, Link(latency=float(latency), jitter=float(jitter))) for name in names]
    print("forwarding", flush=True)
    Switch(ports).run(sys.stdin.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
