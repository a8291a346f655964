"""The wire limit, `raw-tcp`: plain sockets and threads that do only a hub's work.

A worker sends its gradients slice by slice while it receives parameters. There are no keys, no retries and no
membership: if a process fails, the run ends.
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
"""File in the job's directory with the server's address."""
_NUMBER = struct.Struct("!I")


class Wire:
    """One TCP connection with numbered slices; one thread can send while another receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int, payload: memoryview) -> None:
        """Returns once the kernel has accepted all bytes."""
        sent = self._socket.sendmsg([_NUMBER.pack(number), payload]) - _NUMBER.size
        self._socket.sendall(payload[sent:])

    def receive_number(self) -> int:
        """Receives the number of the next slice.

        Raises:
            EOFError: The peer has left.
        """
        head = bytearray(_NUMBER.size)
        self.receive_into(memoryview(head))
        number: int = _NUMBER.unpack(head)[0]
        return number

    def receive_into(self, memory: memoryview) -> None:
        """Fills `memory` from the socket.

        Raises:
            EOFError: The peer has left.
        """
        while memory:
            received = self._socket.recv_into(memory)
            if not received:
                raise EOFError
            memory = memory[received:]

    def close(self) -> None:
        """Closes the connection."""
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
        if len(self._outgoing) == 1:  # nothing overlaps, so a thread would only add time
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
    """Returns the tensor's memory as slices, without a copy."""
    return [bytes_of(piece) for piece in torch.split(flat, slice_bytes // flat.itemsize)]


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the tensor's memory, without a copy."""
    return tensor.view(torch.uint8).numpy().data


def _dial(job: Job) -> socket.socket:
    file = job.place / ADDRESS
    while not file.exists():  # the bench starts the server first, and ends this process if the server fails
        time.sleep(0.05)
    host, _, port = file.read_text().rpartition(":")
    return socket.create_connection((host, int(port)))
