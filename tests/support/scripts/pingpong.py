"""Two ends of one connection: sends bytes back and forth, and compares them.

    pingpong.py ADDRESS         prints its port, then answers one caller
    pingpong.py ADDRESS PORT    calls; prints the seconds of each round trip

After the pings the caller sends a stream and closes its sending side; the answer is the stream's digest.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import sys
import time

PINGS, STREAM_BYTES = 20, 4 << 20


def answer(address: str) -> None:
    with socket.create_server((address, 0)) as door:
        print(door.getsockname()[1], flush=True)
        line, _ = door.accept()
    with line, line.makefile("rwb") as file:
        for _ in range(PINGS):
            file.write(file.readline())
            file.flush()
        digest = hashlib.sha256()
        while piece := file.read(1 << 16):  # until the caller closes its sending side; it still receives
            digest.update(piece)
        file.write(digest.digest())


def call(address: str, port: int) -> None:
    seconds = []
    with socket.create_connection((address, port)) as line, line.makefile("rwb") as file:
        for number in range(PINGS):
            began = time.perf_counter()
            file.write(b"%d\n" % number)
            file.flush()
            assert file.readline() == b"%d\n" % number
            seconds.append(time.perf_counter() - began)
        stream = random.Random(0).randbytes(STREAM_BYTES)
        file.write(stream)
        file.flush()
        line.shutdown(socket.SHUT_WR)
        assert file.read() == hashlib.sha256(stream).digest(), "other bytes came than were sent"
    print(json.dumps(seconds))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        call(sys.argv[1], int(sys.argv[2]))
    else:
        answer(sys.argv[1])
