"""The bound for a hub between hosts: plain TCP sockets and threads that do its work and nothing else.

    python -m workers.bench.raw serve --size N --megabytes M --address-file F
    python -m workers.bench.raw work HOST:PORT --rank R --size N --megabytes M

A worker sends its gradients slice by slice while it receives parameters. The
server averages a slice once all ranks gave it, steps it with torch's fused SGD,
and sends it back while others still arrive. There are no keys, no retries, no
membership: whoever breaks off ends the run.

A worker obeys as the members of the other rows do: a line on standard input
is a number of steps, and the reply a line of JSON with each step's seconds and
how many elements came out wrong.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SLICE_BYTES = 4 << 20
PERIOD = 1024
"""Gradients repeat after so many elements, and so must the parameters."""
LR, MOMENTUM = 0.1, 0.9
BARRIER = 2**32 - 1

_NUMBER = struct.Struct("!I")


class Line:
    """One TCP connection that carries numbered slices; one thread may send while another receives."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int, payload: memoryview) -> None:
        """Returns once the kernel has taken it all."""
        sent = self._line.sendmsg([_NUMBER.pack(number), payload]) - _NUMBER.size
        self._line.sendall(payload[sent:])

    def receive_number(self) -> int:
        """The number of the next slice.

        Raises:
            EOFError: The peer has left.
        """
        head = bytearray(_NUMBER.size)
        self.receive_into(memoryview(head))
        number: int = _NUMBER.unpack(head)[0]
        return number

    def receive_into(self, memory: memoryview) -> None:
        """Fills `memory` from the wire.

        Raises:
            EOFError: The peer has left.
        """
        while memory:
            got = self._line.recv_into(memory)
            if not got:
                raise EOFError
            memory = memory[got:]


class Hub:
    """Averages, steps and answers; the thread that receives a slice's last gradient does it."""

    def __init__(self, size: int, megabytes: int) -> None:
        self._values = slices_of(zeros(megabytes))
        self._gradients = [slices_of(zeros(megabytes)) for _ in range(size)]
        self._steps = [
            torch.optim.SGD([values], lr=LR, momentum=MOMENTUM, fused=True) for values in self._values
        ]
        self._missing: dict[int, int] = {}
        self._lock = threading.Lock()
        self._outboxes: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(size)]

    def serve(self, listener: socket.socket) -> None:
        """Serves every rank until it leaves."""
        threads = []
        for rank in range(len(self._outboxes)):
            line = Line(listener.accept()[0])
            threads.append(threading.Thread(target=self._receive, args=(rank, line)))
            threading.Thread(target=self._send, args=(rank, line), daemon=True).start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _receive(self, rank: int, line: Line) -> None:
        while True:
            try:
                number = line.receive_number()
            except EOFError:
                return
            if number != BARRIER:
                line.receive_into(bytes_of(self._gradients[rank][number]))
            if self._completes(number):
                if number != BARRIER:
                    self._step(number)
                for outbox in self._outboxes:
                    outbox.put(number)

    def _completes(self, number: int) -> bool:
        with self._lock:
            missing = self._missing.pop(number, len(self._outboxes)) - 1
            if missing:
                self._missing[number] = missing
            return not missing

    def _step(self, number: int) -> None:
        mean = self._gradients[0][number]
        for gradients in self._gradients[1:]:
            mean.add_(gradients[number])
        if len(self._gradients) > 1:
            mean.div_(len(self._gradients))
        self._values[number].grad = mean
        self._steps[number].step()

    def _send(self, rank: int, line: Line) -> None:
        while True:
            number = self._outboxes[rank].get()
            line.send(number, memoryview(b"") if number == BARRIER else bytes_of(self._values[number]))


class Worker:
    """One rank; knows what must come out from torch's own SGD on one period of the parameters."""

    def __init__(self, address: str, rank: int, size: int, megabytes: int) -> None:
        host, _, port = address.rpartition(":")
        self._line = Line(socket.create_connection((host, int(port))))
        self._gradients, self._values = zeros(megabytes), zeros(megabytes)
        self._outgoing = [bytes_of(piece) for piece in slices_of(self._gradients)]
        self._incoming = [bytes_of(piece) for piece in slices_of(self._values)]
        pattern = torch.arange(PERIOD) % 7 + 1.0
        self._gradient = pattern * (rank + 1)
        self._expected = nn.Parameter(torch.zeros(PERIOD))
        self._expected.grad = pattern * (size + 1) / 2  # the mean of 1, 2, ... n
        self._sgd = torch.optim.SGD([self._expected], lr=LR, momentum=MOMENTUM)

    def obey(self, steps: int) -> dict[str, object]:
        """Takes some steps; returns each one's seconds, and the wrong elements after the last."""
        return {"seconds": [self._step() for _ in range(steps)], "wrong": self._wrong()}

    def _step(self) -> float:
        self._gradients.view(-1, PERIOD).copy_(self._gradient)
        self._line.send(BARRIER, memoryview(b""))
        assert self._line.receive_number() == BARRIER
        began = time.perf_counter()
        sender = threading.Thread(target=self._send)
        sender.start()
        for _ in self._incoming:
            self._line.receive_into(self._incoming[self._line.receive_number()])
        sender.join()
        seconds = time.perf_counter() - began
        self._sgd.step()
        return seconds

    def _send(self) -> None:
        for number, payload in enumerate(self._outgoing):
            self._line.send(number, payload)

    def _wrong(self) -> int:
        right = torch.isclose(self._values.view(-1, PERIOD), self._expected.detach(), rtol=1e-5, atol=0.0)
        return self._values.numel() - int(right.sum())


def zeros(megabytes: int) -> Tensor:
    """Float32, so many MiB."""
    return torch.zeros(megabytes << 18)


def slices_of(tensor: Tensor) -> list[Tensor]:
    """What travels at once."""
    return list(tensor.split(SLICE_BYTES // tensor.itemsize))


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory."""
    return tensor.view(torch.uint8).numpy().data


def main() -> None:
    """Serves until all ranks have left, or works until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m workers.bench.raw")
    roles = parser.add_subparsers(dest="role", required=True)
    serve, work = roles.add_parser("serve"), roles.add_parser("work")
    for role in (serve, work):
        role.add_argument("--size", type=int, required=True, help="how many ranks")
        role.add_argument("--megabytes", type=int, required=True, help="MiB of float32 parameters")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--address-file", type=Path, required=True, help="where HOST:PORT is written")
    work.add_argument("address")
    work.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role == "serve":
        with socket.create_server((options.host, 0)) as listener:
            hub = Hub(options.size, options.megabytes)
            options.address_file.write_text("{}:{}".format(*listener.getsockname()))
            hub.serve(listener)
        return
    worker = Worker(options.address, options.rank, options.size, options.megabytes)
    for order in sys.stdin:
        print(json.dumps(worker.obey(int(order))), flush=True)


if __name__ == "__main__":
    main()
