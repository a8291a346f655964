"""Writes what passes a network device of this namespace to a file, until SIGTERM: sniffer.py DEVICE FILE."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

EVERY_PROTOCOL = 3  # linux/if_ether.h
RECEIVE_BUFFER = 33  # SO_RCVBUFFORCE
ROOM = 64 << 20
MOST = 16 << 20
"""Bytes to write; a job that trains on sends the same again."""


def main(device: str, file: str) -> None:
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)) as frames,
        Path(file).open("wb", buffering=0) as out,
    ):
        frames.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, ROOM)
        frames.bind((device, 0))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("listening", file=sys.stderr, flush=True)
        while out.tell() < MOST:
            out.write(frames.recv(1 << 17))
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
