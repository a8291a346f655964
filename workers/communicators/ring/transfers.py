"""Sends tensors from one rank of a ring to another.

Transfers with different names need no order: the tag is computed from the name. Transfers with
one name run one after another. A transfer can wait long for the other rank, so each name has
its own thread while it has transfers.

On a ring that heals, the loss of a member ends the transfers of the others too. Law: a transfer is then done
on both ends, or both run it again. So the receiver confirms the tensor and holds it. The sender's call ends
with that, and the receiver's call once the sender has acknowledged it. If the generation ends before, the
receiver looks whether the sender's note says that it sends the tensor again.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.errors import HubringError, UsageError
from hubring.ps.core.messages import Call
from hubring.ps.core.types import DtypeAndShape
from hubring.ps.core.work import Work
from hubring.workers.communicators.base import CollectiveWork, Communicator, receiver
from hubring.workers.communicators.ring.process_group import Ring

HEAD_BYTES = 2048
"""Size of the header before each tensor: its name and layout, padded with spaces."""


class ReceivedTensor(NamedTuple):
    """A received tensor.

    Attributes:
        number: The sender's number for the transfer.
    """

    number: int
    tensor: Tensor


class ConfirmedWork(CollectiveWork):
    """The work of a call in one generation of a ring that heals.

    Args:
        call: The call.
        communicator: See `CollectiveWork`.
        accept: Ends the sender's call, if its generation has not ended; returns whether it does.

    Attributes:
        number: The sender's number for a transfer whose tensor it sends; 0 before.
        held: The tensor that the receiver of a transfer has.
    """

    def __init__(self, call: Call, communicator: Communicator, accept: Callable[[], bool]) -> None:
        super().__init__(call, list, communicator)
        self.accept = accept
        self.number = 0
        self.held: ReceivedTensor | None = None


class _Head(NamedTuple):
    name: str
    layout: DtypeAndShape
    number: int


class _Transfer(NamedTuple):
    call: Call
    tensors: tuple[Tensor, ...]
    work: CollectiveWork


class Transfers:
    """The transfers of one rank.

    Attributes:
        ring: The process group of all ranks, set before the first transfer. Other code may use it meanwhile.
    """

    ring: Ring

    def __init__(self) -> None:
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._lines: dict[str, deque[_Transfer]] = {}
        """Waiting transfers by name. The name's thread runs one more."""

    @property
    def idle(self) -> bool:
        """Whether no transfer is running or waiting."""
        return not self._lines

    def take_part(self, call: Call, tensors: tuple[Tensor, ...], work: CollectiveWork) -> None:
        """Sends or receives a tensor, in the order of calls with one name."""
        transfer = _Transfer(call, tensors, work)
        with self._lock:
            line = self._lines.get(call.name)
            if line is not None:
                line.append(transfer)
                return
            self._lines[call.name] = deque([transfer])
        threading.Thread(target=self._carry_all, args=(call.name,), name="transfer", daemon=True).start()

    def _carry_all(self, name: str) -> None:
        torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
        while True:
            with self._lock:
                line = self._lines[name]
                if not line:
                    del self._lines[name]
                    return
                transfer = line.popleft()
            try:
                self._carry(transfer)
            except Exception as error:  # any error: a caller waits for this work
                transfer.work.fail(error)

    def _carry(self, transfer: _Transfer) -> None:
        if self.ring.rank == transfer.call.root:
            self._give(*transfer)
        else:
            self._take(transfer.call, transfer.work)

    def _give(self, call: Call, tensors: tuple[Tensor, ...], work: CollectiveWork) -> None:
        (tensor,) = tensors
        number, to = next(self._numbers), receiver(call)
        if isinstance(work, ConfirmedWork):
            work.number = number
        self._send(work, _encode(call, number), to, call)
        if tensor.numel():
            self._send(work, tensor.reshape(-1).view(torch.uint8), to, call)
        if isinstance(work, ConfirmedWork):
            self._receive(work, _byte(), to, call)
            if not work.accept():
                return
            with suppress(HubringError):  # the receiver learns it in the next generation
                self._send(Work(work.what), _byte(), to, call)
        work.deliver([])

    def _take(self, call: Call, work: CollectiveWork) -> None:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8, device="cpu")
        self._receive(work, head, call.root, call)
        name, (dtype, shape), number = _heads.decode(bytes(head.numpy()))
        if name != call.name:
            raise HubringError(f"transfers {name!r} and {call.name!r} have the same tag: rename one of them")
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        if tensor.numel():
            self._receive(work, tensor.view(-1).view(torch.uint8), call.root, call)
        if isinstance(work, ConfirmedWork):
            work.held = ReceivedTensor(number, tensor)
            self._send(work, _byte(), call.root, call)
            self._receive(work, _byte(), call.root, call)
        work.deliver([tensor])

    def _send(self, whose: Work, memory: Tensor, to: int, call: Call) -> None:
        self.ring.exchange(whose, lambda group: group.send([memory], to, _tag(call)))

    def _receive(self, whose: Work, memory: Tensor, source: int, call: Call) -> None:
        self.ring.exchange(whose, lambda group: group.recv([memory], source, _tag(call)))


def _tag(call: Call) -> int:
    return zlib.crc32(call.name.encode()) >> 1


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


_heads = msgspec.json.Decoder(_Head)


def _encode(call: Call, number: int) -> Tensor:
    packed = msgspec.json.encode(_Head(call.name, call.layouts[0], number))
    if len(packed) > HEAD_BYTES:
        raise UsageError(
            f"the transfer's name has {len(call.name)} characters, and name and layout must fit in"
            f" {HEAD_BYTES} bytes: use a shorter name"
        )
    return torch.frombuffer(bytearray(packed.ljust(HEAD_BYTES)), dtype=torch.uint8)
