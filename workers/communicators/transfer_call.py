"""The call of a transfer. It has a direction: one name may be in use in both directions at once."""

from __future__ import annotations

from dataclasses import replace

from hubring.ps.core.messages import Call, Collective


def transfer_call(name: str, source: int, to: int) -> Call:
    """Returns the call with which one rank sends and another one receives."""
    spelt = name + _direction(source, to)
    return Call(Collective.TRANSFER, spelt, root=source, ranks=tuple(sorted((source, to))))


def receiver(call: Call) -> int:
    """Returns the rank that receives; the root sends."""
    return next(rank for rank in call.ranks if rank != call.root)


def moved(call: Call, source: int, to: int) -> Call:
    """Returns the call of the same transfer between ranks with other numbers."""
    name = call.name.removesuffix(_direction(call.root, receiver(call)))
    return replace(transfer_call(name, source, to), layouts=call.layouts)


def _direction(source: int, to: int) -> str:
    return f" from {source} to {to}"
