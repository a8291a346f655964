"""The wire's limit, `raw-tcp`: plain sockets and threads that do a hub's work and nothing else.

A worker sends its gradients slice by slice while it receives parameters. There
are no keys, no retries, no membership: whoever breaks off ends the run.
"""

from __future__ import annotations

import socket
import struct
import threading
import time

import torch
from torch import Tensor

from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.row_member import FlatSide

ADDRESS = "address"
"""File in the job's directory that says where the server listens."""
_NUMBER = struct.Struct("!I")


class Wire:
    """One TCP connection that carries numbered slices; one thread may send while another receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int, payload: memoryview) -> None:
        """Returns once the kernel has taken it all."""
        sent = self._socket.sendmsg([_NUMBER.pack(number), payload]) - _NUMBER.size
        self._socket.sendall(payload[sent:])

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
            received = self._socket.recv_into(memory)
            if not received:
                raise EOFError
            memory = memory[received:]

    def close(self) -> None:
        """Leaves."""
        self._socket.close()


class Raw(FlatSide):
    """A worker; `hubring.workers.bench.rows.raw_server` is its hub."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        self._wire = Wire(_dial(job))
        self._wire.send(rank, memoryview(b""))
        self._outgoing = slices_of(self._model.gradients, job.slice_bytes)
        self._incoming = slices_of(self._model.values, job.slice_bytes)

    def step(self) -> None:
        if len(self._outgoing) == 1:  # nothing to overlap: a thread would only cost
            self._send()
            self._receive()
            return
        sender = threading.Thread(target=self._send)
        sender.start()
        self._receive()
        sender.join()

    def close(self) -> None:
        self._wire.close()

    def _send(self) -> None:
        for number, payload in enumerate(self._outgoing):
            self._wire.send(number, payload)

    def _receive(self) -> None:
        for _ in self._incoming:
            self._wire.receive_into(self._incoming[self._wire.receive_number()])


def slices_of(flat: Tensor, slice_bytes: int) -> list[memoryview]:
    """The tensor's own memory, cut into what travels at once."""
    return [bytes_of(piece) for piece in torch.split(flat, slice_bytes // flat.itemsize)]


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory."""
    return tensor.view(torch.uint8).numpy().data


def _dial(job: Job) -> socket.socket:
    file = job.place / ADDRESS
    while not file.exists():  # the bench started the server first, and ends this process if that fails
        time.sleep(0.05)
    host, _, port = file.read_text().rpartition(":")
    return socket.create_connection((host, int(port)))
