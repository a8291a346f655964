"""The rows that measure limits: exchanges in memory, and `raw-tcp`, plain sockets that do a hub's work.

`raw-tcp-aes` also encrypts, with the cipher and the library of Hubring's ZeroMQ.

In memory there are no messages, no waiting and no other process. The process computes the mean of N gradients
and the step with the same loops as a shard, and in huge pages, like a shard.

With `raw-tcp` a worker sends its gradients slice by slice while it receives parameters. The server averages a
slice once all ranks have sent it, steps it like a shard, and returns it while other slices still arrive.
There are no keys, no retries and no membership: if a process fails, the run ends. The server:

    python -m hubring.workers.bench.raw JOB [aes]
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from hubring.ps.optim.block_optimizers import optimizer_for
from hubring.ps.optim.blocks import BLOCK_BYTES, BlockSteps
from hubring.ps.optim.sums import zeros, zeros_like
from hubring.workers.bench.job import BenchJob
from hubring.workers.bench.member import FlatRowMember, RowMember, on_server

BLOCK = BLOCK_BYTES // 4
"""Elements of a block."""


class Bound(RowMember):
    """`bound-memory`: all slices on one thread.

    `bound-memory-2` divides the slices between two processes, like two shards.
    """

    parts = 1
    """Number of processes that share the model."""

    def __init__(self, job: BenchJob, rank: int) -> None:
        super().__init__(job, rank)
        torch.set_num_threads(1)
        self.ranks = range(job.size)
        numel = job.nbytes // 4
        share = -(-numel // self.parts)
        self._values = zeros(min(share, numel - rank * share), torch.float32)
        self._gradients = [zeros_like(self._values) for _ in self.ranks]
        self._slices = bound_slices(job, self._values, self._gradients, BLOCK, torch.empty(BLOCK))

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return [self._gradients[rank]]

    def values(self) -> Sequence[Tensor]:
        return [self._values]

    def step(self) -> None:
        for each in self._slices:
            each.step()


class BoundOfTwo(Bound):
    """`bound-memory-2`."""

    parts = 2


class BoundCopy(Bound):
    """`bound-copy`: copies each slice for every worker immediately after the step."""

    def __init__(self, job: BenchJob, rank: int) -> None:
        super().__init__(job, rank)
        self._copies = [zeros_like(self._values) for _ in self.ranks]
        self._windows = list(zip(*(torch.split(copy, BLOCK) for copy in self._copies), strict=True))

    def values(self) -> Sequence[Tensor]:
        return self._copies

    def step(self) -> None:
        for each, windows in zip(self._slices, self._windows, strict=True):
            each.step()
            for window in windows:
                window.copy_(each.values)


class BoundCuda(RowMember):
    """`bound-cuda`: the whole model on one GPU, with the kernels of a shard."""

    def __init__(self, job: BenchJob, rank: int) -> None:
        super().__init__(job, rank)
        self.ranks = range(job.size)
        self._values = torch.zeros(job.nbytes // 4, device=job.device)
        self._gradients = [torch.zeros_like(self._values) for _ in self.ranks]
        self._scratch = torch.empty_like(self._values)
        name, self._hyper = on_server(job.optimizer)
        self._steps = optimizer_for(name, self._values.device)

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return [self._gradients[rank]]

    def values(self) -> Sequence[Tensor]:
        return [self._values]

    def step(self) -> None:
        self._steps.step(self._values, self._gradients, len(self.ranks), self._hyper, self._scratch)


class BoundSlice:
    """One slice, its optimizer, and the ranks' gradients."""

    def __init__(self, optimizer: str, values: Tensor, gradients: list[Tensor], scratch: Tensor) -> None:
        self.values = values
        self._gradients = gradients
        self._scratch = scratch
        name, self._hyper = on_server(optimizer)
        self._steps = BlockSteps(name, values, finite=False)

    def step(self) -> None:
        """Steps with the mean of the gradients."""
        self._steps.step(self._gradients, self._hyper, self._scratch)


def bound_slices(
    job: BenchJob, values: Tensor, gradients: Sequence[Tensor], numel: int, scratch: Tensor | None = None
) -> list[BoundSlice]:
    """Returns the slices of a model.

    Args:
        job: The job.
        values: The flat parameters.
        gradients: The flat gradients of every rank.
        numel: Elements of a slice.
        scratch: Memory that all slices use, one after another; None: each has its own.
    """
    given = zip(*(torch.split(each, numel) for each in gradients), strict=True)
    return [
        BoundSlice(job.optimizer, part, list(parts), torch.empty_like(part) if scratch is None else scratch)
        for part, parts in zip(torch.split(values, numel), given, strict=True)
    ]


ADDRESS = "address"
"""File in the job's directory with the server's address."""
_NUMBER = struct.Struct("!I")


class RawConnection:
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
        number: int = _NUMBER.unpack(self._fill(memoryview(bytearray(_NUMBER.size))))[0]
        return number

    def receive_into(self, memory: memoryview) -> None:
        """Fills `memory` with the slice.

        Raises:
            EOFError: The peer has left.
        """
        self._fill(memory)

    def _fill(self, filled: memoryview) -> memoryview:
        memory = filled
        while memory:
            received = self._socket.recv_into(memory)
            if not received:
                raise EOFError
            memory = memory[received:]
        return filled

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


_TAG_BYTES = 16


class AesConnection(RawConnection):
    """The same with AES-128-GCM. All slices have one key and nonce, so it measures, and protects nothing."""

    _sent = memoryview(b"")

    def send(self, number: int, payload: memoryview) -> None:
        context, end = self._cipher().encryptor(), payload.nbytes
        if len(self._sent) < end + _TAG_BYTES:
            self._sent = memoryview(bytearray(end + _TAG_BYTES))
        context.update_into(payload, self._sent[:end])
        context.finalize()
        self._sent[end : end + _TAG_BYTES] = context.tag
        super().send(number, self._sent[: end + _TAG_BYTES])

    def receive_into(self, memory: memoryview) -> None:
        self._fill(memory)
        context = self._cipher().decryptor()
        context.update_into(memory, memory)
        context.finalize_with_tag(bytes(self._fill(memoryview(bytearray(_TAG_BYTES)))))

    @staticmethod
    def _cipher() -> Cipher[modes.GCM]:
        return Cipher(algorithms.AES128(bytes(16)), modes.GCM(bytes(12)))


class Raw(FlatRowMember):
    """`raw-tcp`: a worker; `hubring.workers.bench.raw` is its hub."""

    connection = RawConnection

    def __init__(self, job: BenchJob, rank: int) -> None:
        super().__init__(job, rank)
        connected = _dial(job)
        connected.sendall(_NUMBER.pack(rank))
        self._wire = self.connection(connected)
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


class RawAes(Raw):
    """`raw-tcp-aes`."""

    connection = AesConnection


def slices_of(flat: Tensor, slice_bytes: int) -> list[memoryview]:
    """Returns the tensor's memory as slices, without a copy."""
    return [bytes_of(piece) for piece in torch.split(flat, slice_bytes // flat.itemsize)]


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the tensor's memory, without a copy."""
    return tensor.view(torch.uint8).numpy().data


def _dial(job: BenchJob) -> socket.socket:
    file = job.place / ADDRESS
    while not file.exists():  # the bench starts the server first, and ends this process if the server fails
        time.sleep(0.05)
    host, _, port = file.read_text().rpartition(":")
    return socket.create_connection((host, int(port)))


class RawServer:
    """Each connection has two threads. The thread that receives a slice's last gradient steps the slice."""

    def __init__(self, job: BenchJob, connection: type[RawConnection]) -> None:
        self._connection = connection
        values, *gradients = (zeros(job.nbytes // 4, torch.float32) for _ in range(1 + job.size))
        self._inboxes = [slices_of(gradient, job.slice_bytes) for gradient in gradients]
        self._slices = bound_slices(job, values, gradients, job.slice_bytes // 4)
        self._missing = [job.size] * len(self._slices)
        self._lock = threading.Lock()
        self._outboxes: list[SimpleQueue[int]] = [SimpleQueue() for _ in range(job.size)]

    def serve(self, listener: socket.socket) -> None:
        """Serves every rank until it leaves."""
        receivers = []
        for _ in self._outboxes:
            wire = self._connection(listener.accept()[0])
            rank = wire.receive_number()
            receivers.append(threading.Thread(target=self._receive, args=(rank, wire)))
            threading.Thread(target=self._send, args=(rank, wire), daemon=True).start()
        for receiver in receivers:
            receiver.start()
        for receiver in receivers:
            receiver.join()

    def _receive(self, rank: int, wire: RawConnection) -> None:
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

    def _send(self, rank: int, wire: RawConnection) -> None:
        while True:
            number = self._outboxes[rank].get()
            wire.send(number, bytes_of(self._slices[number].values))


def main() -> None:
    """Serves until all ranks have left."""
    torch.set_num_threads(1)  # the same as a shard
    job = BenchJob.decode(sys.argv[1])
    server = RawServer(job, AesConnection if sys.argv[2:] == ["aes"] else RawConnection)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        written = job.place / f"{ADDRESS}.new"
        written.write_text("{}:{}".format(*listener.getsockname()))
        written.rename(job.place / ADDRESS)
        server.serve(listener)


if __name__ == "__main__":
    main()
