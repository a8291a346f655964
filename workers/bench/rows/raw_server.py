"""The server of `raw-tcp`: `python -m hubring.workers.bench.rows.raw_server JOB`.

The server averages a slice once all ranks have sent it, steps it like a shard, and returns it while other
slices still arrive.
"""

from __future__ import annotations

import socket
import sys
import threading
from queue import SimpleQueue

import torch

from hubring.ps.optim.zeros import zeros
from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.bound import Slice
from hubring.workers.bench.rows.raw import ADDRESS, Wire, bytes_of, slices_of


class RawServer:
    """Each connection has two threads. The thread that receives a slice's last gradient steps the slice."""

    def __init__(self, job: Job) -> None:
        length, numel = job.slice_bytes // 4, job.nbytes // 4
        values = zeros(numel, torch.float32)
        gradients = [zeros(numel, torch.float32) for _ in range(job.size)]
        self._inboxes = [slices_of(gradient, job.slice_bytes) for gradient in gradients]
        given = zip(*(torch.split(gradient, length) for gradient in gradients), strict=True)
        pairs = zip(torch.split(values, length), given, strict=True)
        self._slices = [
            Slice(job.optimizer, part, list(parts), torch.empty_like(part)) for part, parts in pairs
        ]
        self._missing = [job.size] * len(self._slices)
        self._lock = threading.Lock()
        self._outboxes: list[SimpleQueue[int]] = [SimpleQueue() for _ in range(job.size)]

    def serve(self, listener: socket.socket) -> None:
        """Serves every rank until it leaves."""
        receivers = []
        for _ in self._outboxes:
            wire = Wire(listener.accept()[0])
            rank = wire.receive_number()
            receivers.append(threading.Thread(target=self._receive, args=(rank, wire)))
            threading.Thread(target=self._send, args=(rank, wire), daemon=True).start()
        for receiver in receivers:
            receiver.start()
        for receiver in receivers:
            receiver.join()

    def _receive(self, rank: int, wire: Wire) -> None:
        while True:
            try:
                number = wire.receive_number()
            except EOFError:
                return
            wire.receive_into(self._inboxes[rank][number])
            if self._completes(number):
                self._slices[number].step()
                for outbox in self._outboxes:
                    outbox.put(number)

    def _completes(self, number: int) -> bool:
        with self._lock:
            self._missing[number] -= 1
            if self._missing[number]:
                return False
            self._missing[number] = len(self._outboxes)
            return True

    def _send(self, rank: int, wire: Wire) -> None:
        while True:
            number = self._outboxes[rank].get()
            wire.send(number, bytes_of(self._slices[number].values))


def main() -> None:
    """Serves until all ranks have left."""
    torch.set_num_threads(1)  # the same as a shard
    job = Job.decode(sys.argv[1])
    server = RawServer(job)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        written = job.place / f"{ADDRESS}.new"
        written.write_text("{}:{}".format(*listener.getsockname()))
        written.rename(job.place / ADDRESS)
        server.serve(listener)


if __name__ == "__main__":
    main()
