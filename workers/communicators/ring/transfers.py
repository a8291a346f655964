"""Sends tensors from one rank of a ring to another.

Transfers with different names need no order: the tag is computed from the name. Transfers with
one name run one after another. A transfer can wait long for the other rank, so each name has
its own thread while it has transfers.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.errors import HubringError, UsageError
from hubring.ps.core.messages import Call
from hubring.ps.core.types import Layout
from hubring.workers.communicators.base import CollectiveWork
from hubring.workers.communicators.ring.process_group import Ring

HEAD_BYTES = 2048
"""Size of the header before each tensor: its name and layout, padded with spaces."""


class _Head(NamedTuple):
    name: str
    layout: Layout


class _Transfer(NamedTuple):
    call: Call
    tensors: tuple[Tensor, ...]
    work: CollectiveWork


class Transfers:
    """The transfers of one rank.

    Args:
        ring: The process group of all ranks. Other code may use it at the same time.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
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
        call = transfer.call
        source, to = call.root, next(rank for rank in call.ranks if rank != call.root)
        tag = zlib.crc32(call.name.encode()) >> 1
        if self._ring.rank == source:
            (tensor,) = transfer.tensors
            self._send(transfer, _encode(call), to, tag)
            if tensor.numel():
                self._send(transfer, tensor.reshape(-1).view(torch.uint8), to, tag)
            transfer.work.deliver([])
        else:
            transfer.work.deliver([self._receive(transfer, source, tag)])

    def _send(self, transfer: _Transfer, memory: Tensor, to: int, tag: int) -> None:
        self._ring.exchange(transfer.work, lambda group: group.send([memory], to, tag))

    def _receive(self, transfer: _Transfer, source: int, tag: int) -> Tensor:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._ring.exchange(transfer.work, lambda group: group.recv([head], source, tag))
        name, (dtype, shape) = _heads.decode(bytes(head.numpy()))
        if name != transfer.call.name:
            raise HubringError(
                f"transfers {name!r} and {transfer.call.name!r} have the same tag: rename one of them"
            )
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            memory = tensor.view(-1).view(torch.uint8)
            self._ring.exchange(transfer.work, lambda group: group.recv([memory], source, tag))
        return tensor


_heads = msgspec.json.Decoder(_Head)


def _encode(call: Call) -> Tensor:
    packed = msgspec.json.encode(_Head(call.name, call.layouts[0]))
    if len(packed) > HEAD_BYTES:
        raise UsageError(
            f"the transfer's name has {len(call.name)} characters, and name and layout must fit in"
            f" {HEAD_BYTES} bytes: use a shorter name"
        )
    return torch.frombuffer(bytearray(packed.ljust(HEAD_BYTES)), dtype=torch.uint8)
