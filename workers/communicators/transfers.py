"""Tensors from one rank of a ring to another.

They need no order among themselves: each goes under a tag made of its name, and
those of one name one after another. A transfer may wait long for its other end,
so each name has a thread of its own while something is under way.
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
from hubring.workers.communicators.ring_process_group import Ring

HEAD_BYTES = 2048
"""What goes before each tensor: its layout and its name, padded with spaces."""


class _Head(NamedTuple):
    name: str
    layout: Layout


class _Transfer(NamedTuple):
    call: Call
    tensors: tuple[Tensor, ...]
    work: CollectiveWork


class Transfers:
    """Those that one rank takes part in.

    Args:
        ring: All ranks'; others may use it at the same time.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._lines: dict[str, deque[_Transfer]] = {}
        """Under way, by name; the first of each line is with the line's thread."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._lines

    def take_part(self, call: Call, tensors: tuple[Tensor, ...], work: CollectiveWork) -> None:
        """Sends the tensor, or receives one; in the order of calls under one name."""
        transfer = _Transfer(call, tensors, work)
        with self._lock:
            line = self._lines.get(call.name)
            if line is not None:
                line.append(transfer)
                return
            self._lines[call.name] = deque([transfer])
        threading.Thread(target=self._carry_all, args=(call.name,), name="transfer", daemon=True).start()

    def _carry_all(self, name: str) -> None:
        torch.get_num_threads()  # a thread that never asked has MKL take every core (torch 2.13)
        while True:
            with self._lock:
                line = self._lines[name]
                if not line:
                    del self._lines[name]
                    return
                transfer = line.popleft()
            try:
                self._carry(transfer)
            except Exception as error:  # whatever it is, somebody waits for this work
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
        told = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._ring.exchange(transfer.work, lambda group: group.recv([told], source, tag))
        name, (dtype, shape) = _heads.decode(bytes(told.numpy()))
        if name != transfer.call.name:
            raise HubringError(f"{name!r} and {transfer.call.name!r} have the same tag: rename one of them")
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            memory = tensor.view(-1).view(torch.uint8)
            self._ring.exchange(transfer.work, lambda group: group.recv([memory], source, tag))
        return tensor


_heads = msgspec.json.Decoder(_Head)


def _encode(call: Call) -> Tensor:
    packed = msgspec.json.encode(_Head(call.name, call.layouts[0]))
    if len(packed) > HEAD_BYTES:
        raise UsageError(f"a name of {len(call.name)} characters is too long to send: shorten it")
    return torch.frombuffer(bytearray(packed.ljust(HEAD_BYTES)), dtype=torch.uint8)
