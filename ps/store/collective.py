"""The result of a collective for each member, or the reason for a refusal.

Hub, ring and single worker use this module, so that their checks, messages and
results are equal. Parts come in rank order.

    allreduce       the reduction of all           reduce     the reduction, only for the root
    allgather       all rows, concatenated         gather     all tensors, only for the root
    broadcast       the root's tensors             scatter    one of the root's tensors
    reduce_scatter  a share of the reduction's rows; the first members get the remaining rows
    alltoall        the rows that each member sends to this one, and their counts
    transfer        the root's tensor, for the other member
    barrier, group  nothing, once all members have called

A rank that called join() stands in a reduction with zeros, and does not block a barrier. In any
other operation its part would be missing, so the operation is refused on the ranks that called it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.core.messages import Call, Code, Collective, ReduceOp, Refusal
from hubring.ps.core.types import DtypeAndShape

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype in which half-precision tensors are reduced: sums and products are rounded once, at the end."""


def objection_to(op: ReduceOp, dtype: str) -> str:
    """Returns why a reduction does not support a dtype; empty if it does."""
    if getattr(torch, dtype).is_floating_point or op not in (ReduceOp.AVERAGE, ReduceOp.ADASUM):
        return ""
    return f"{op.name.lower()} does not support torch.{dtype}; use sum, or convert to a floating dtype"


def reduced(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Reduces tensors of one shape and dtype to one new tensor."""
    dtype = tensors[0].dtype
    if op is ReduceOp.ADASUM:
        return adasum([tensor.to(WIDER.get(dtype, dtype)) for tensor in tensors]).to(dtype, copy=True)
    wide = dtype if op in (ReduceOp.MIN, ReduceOp.MAX) else WIDER.get(dtype, dtype)
    total = tensors[0].clone() if wide is dtype else tensors[0].to(wide)
    for tensor in tensors[1:]:
        REDUCE_INTO[op](total, tensor if wide is dtype else tensor.to(wide))
    total = averaged(total, len(tensors), op)
    return total if wide is dtype else total.to(dtype)


def averaged(total: Tensor, count: int, op: ReduceOp) -> Tensor:
    """Divides a sum over `count` ranks in place if `op` is an average."""
    return total.div_(count) if op is ReduceOp.AVERAGE else total


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Adds the orthogonal parts of gradients and averages their parallel parts.

    Reduces pairs of neighbours repeatedly (Maleki et al., MLSys 2021):

        adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

    In an odd count, the last tensor moves to the next level unchanged. Inner
    products are computed in float64.
    """
    while len(tensors) > 1:
        pairs = [_adasum_of_two(one, two) for one, two in zip(tensors[::2], tensors[1::2], strict=False)]
        tensors = [*pairs, *tensors[len(tensors) & ~1 :]]
    return tensors[0]


def _adasum_of_two(one: Tensor, two: Tensor) -> Tensor:
    first, second = one.reshape(-1).double(), two.reshape(-1).double()
    common = float(first @ second)
    own, other = float(first @ first), float(second @ second)
    # A zero has no direction, so nothing is subtracted for it.
    share = 1 - common / (2 * own) if own else 1.0
    return one * share + two * (1 - common / (2 * other) if other else 1.0)


REDUCE_INTO: Mapping[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVERAGE: Tensor.add_,
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MIN: lambda total, tensor: torch.minimum(total, tensor, out=total),
    ReduceOp.MAX: lambda total, tensor: torch.maximum(total, tensor, out=total),
}
"""Reduces the second tensor into the first."""


Tensors = tuple[Tensor, ...]

REDUCING = {Collective.ALLREDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER}
_GIVING = {Collective.BROADCAST, Collective.SCATTER, Collective.TRANSFER}
ROOTED = {Collective.REDUCE, Collective.GATHER, *_GIVING}
_BY_ROWS = {Collective.ALLGATHER, Collective.GATHER, Collective.ALLTOALL}


class Part(NamedTuple):
    """One member's call and tensors."""

    rank: int
    call: Call
    tensors: Tensors = ()


def layout_of(tensor: Tensor) -> DtypeAndShape:
    """Returns a tensor's dtype and shape."""
    return DtypeAndShape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def zeros(layouts: Sequence[DtypeAndShape]) -> Tensors:
    """Returns a zeroed tensor for each layout."""
    return tuple(torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu") for dtype, shape in layouts)


def dealt(rows: int, members: int) -> list[int]:
    """Returns how many rows each member gets; the first members get one more for the remainder."""
    return [rows // members + (index < rows % members) for index in range(members)]


def dealt_rows(tensor: Tensor, members: int) -> tuple[Tensor, ...]:
    """Splits a tensor's rows as `dealt` does."""
    pieces: tuple[Tensor, ...] = torch.split(tensor, dealt(len(tensor), members))
    return pieces


def objection(calls: Mapping[int, Call], joined: Collection[int] = ()) -> Refusal | None:
    """Returns why these calls, by rank, do not fit together; None if they do.

    Args:
        calls: The calls of the members that called.
        joined: The other members, which called join().
    """
    first = next(iter(calls.values()))
    if joined and (text := _without(joined, first)):
        return Refusal(Code.BAD_REQUEST, f"{first.name!r}: {text}")
    if len({_must_agree(call) for call in calls.values()}) > 1:
        return _disagreement(calls)
    text = _misplaced_root(calls) if first.collective in ROOTED else ""
    if not text and first.collective is Collective.BROADCAST:
        expected = calls[first.root].layouts
        if any(call.layouts != expected for call in calls.values() if call.layouts):
            return _disagreement({rank: call for rank, call in calls.items() if call.layouts})
    text = text or _unfit(calls)
    return Refusal(Code.BAD_REQUEST, f"{first.name!r}: {text}") if text else None


def outcome(parts: Sequence[Part], joined: Collection[int] = ()) -> Mapping[int, Tensors] | Refusal:
    """Returns each member's result: new tensors, which several members may share.

    Args:
        parts: The parts of the members that called.
        joined: The other members, which called join().
    """
    refusal = objection({part.rank: part.call for part in parts}, joined)
    if refusal is not None:
        return refusal
    zeroed = parts[0].call
    stand_ins = (Part(rank, zeroed, zeros(zeroed.layouts)) for rank in joined)
    parts = sorted([*parts, *stand_ins], key=attrgetter("rank"))
    ranks, call = [part.rank for part in parts], parts[0].call
    nothing: dict[int, Tensors] = dict.fromkeys(ranks, ())
    given = [part.tensors for part in parts]
    match call.collective:
        case Collective.ALLREDUCE:
            return dict.fromkeys(ranks, _reduced(given, call.op))
        case Collective.REDUCE:
            return {**nothing, call.root: _reduced(given, call.op)}
        case Collective.REDUCE_SCATTER:
            pieces = [dealt_rows(tensor, len(ranks)) for tensor in _reduced(given, call.op)]
            return dict(zip(ranks, zip(*pieces, strict=True), strict=True)) if pieces else nothing
        case Collective.ALLGATHER:
            return dict.fromkeys(ranks, _concatenated(given))
        case Collective.GATHER:
            return {**nothing, call.root: tuple(tensor.clone() for tensors in given for tensor in tensors)}
        case Collective.BROADCAST | Collective.SCATTER | Collective.TRANSFER:
            return _from_root(call, ranks, given[ranks.index(call.root)])
        case Collective.ALLTOALL:
            return dict(zip(ranks, _exchanged(parts), strict=True))
        case Collective.BARRIER | Collective.GROUP | Collective.JOIN:
            return nothing


def rows_for(call: Call, members: int) -> list[int]:
    """Returns how many rows a member of an alltoall sends to each member."""
    return list(call.splits) or dealt(_rows(call), members)


# Checks.


def _without(joined: Collection[int], call: Call) -> str:
    """Returns why an operation cannot run without the members that called join(); empty if it can."""
    reduces = call.collective in (Collective.ALLREDUCE, Collective.REDUCE)
    rootless = call.collective in ROOTED and call.root in joined
    if call.collective is Collective.BARRIER or (reduces and not rootless):
        return ""
    verb = call.collective.name.lower()
    many = len(joined) > 1
    text = (
        f"{verb} is not supported after join(): rank{'s' * many} {', '.join(map(str, sorted(joined)))}"
        f" {'have' if many else 'has'} joined and would be missing from it; call {verb} before any rank calls"
        " join(), or after join() has returned on all ranks"
    )
    sparse = "; to reduce a sparse tensor, call to_dense() first"
    return text + sparse * (call.collective is Collective.ALLGATHER)


def _must_agree(call: Call) -> tuple[object, ...]:
    """Returns the properties that must be equal in all members' calls."""
    match call.collective:
        case Collective.ALLREDUCE | Collective.REDUCE_SCATTER:
            return call.collective, call.op, call.layouts
        case Collective.REDUCE:
            return call.collective, call.op, call.root, call.layouts
        case Collective.ALLGATHER | Collective.ALLTOALL:
            # Numbers of rows may differ; a tensor without dimensions counts as one row.
            return call.collective, *((one.dtype, one.shape[1:]) for one in call.layouts)
        case Collective.GATHER:
            # A tensor without dimensions is valid, but not together with tensors that have rows.
            rows = ((one.dtype, one.shape[1:], len(one.shape)) for one in call.layouts)
            return call.collective, call.root, *rows
        case Collective.BROADCAST | Collective.SCATTER | Collective.TRANSFER:
            return call.collective, call.root
        case Collective.GROUP:
            return call.collective, call.splits
        case Collective.BARRIER | Collective.JOIN:
            return (call.collective,)


def _misplaced_root(calls: Mapping[int, Call]) -> str:
    call = next(iter(calls.values()))
    ranks = ", ".join(map(str, calls))
    if call.root not in calls:
        return f"root {call.root} is not a member; members: {ranks}"
    given = calls[call.root].layouts
    if call.collective is Collective.SCATTER and len(given) != len(calls):
        return f"root {call.root} passed {len(given)} tensors to scatter; pass one for each of ranks {ranks}"
    if call.collective in _GIVING and not given:
        return f"root {call.root} passed no tensor; pass the tensor on the root (members: {ranks})"
    return ""


def _unfit(calls: Mapping[int, Call]) -> str:
    call = next(iter(calls.values()))
    if call.collective is Collective.ALLTOALL and len(call.layouts) != 1:
        return f"ranks passed {len(call.layouts)} tensors to alltoall; pass one"
    if call.collective in REDUCING:
        if any(text := objection_to(call.op, layout.dtype) for layout in call.layouts):
            return text
        if call.collective is Collective.REDUCE_SCATTER and not all(one.shape for one in call.layouts):
            return "a tensor without dimensions has no rows to scatter; reshape it to (1,)"
    if call.collective is Collective.TRANSFER and len(calls) != 2:
        return f"a transfer needs two ranks, but only rank {call.root} is left"
    if call.collective is Collective.ALLTOALL:
        return next(filter(None, (_misfit(rank, one, len(calls)) for rank, one in calls.items())), "")
    return ""


def _misfit(rank: int, call: Call, members: int) -> str:
    rows, splits = _rows(call), call.splits
    if not call.layouts[0].shape:
        return f"rank {rank} passed a tensor without dimensions, which has no rows; reshape it to (1,)"
    if splits and (len(splits) != members or sum(splits) != rows or min(splits) < 0):
        return (
            f"rank {rank} splits {rows} rows as {list(splits)}; pass {members} counts that add up to {rows}"
        )
    if not splits and rows % members:
        return f"rank {rank} passed {rows} rows, which are not divisible by {members} ranks; pass splits"
    return ""


def _rows(call: Call) -> int:
    shape = call.layouts[0].shape
    return shape[0] if shape else 1


# Messages.

_LISTED = 4
"""The most tensors of one call that a message lists. Of more, it shows the first that differs."""


def _disagreement(calls: Mapping[int, Call]) -> Refusal:
    name = next(iter(calls.values())).name
    at = _difference([call.layouts for call in calls.values()])
    sent = "; ".join(f"rank {rank} sent {spell(call, at)}" for rank, call in calls.items())
    return Refusal(Code.MISMATCH, f"ranks disagree in {name!r}: {sent}. All ranks must make the same call")


def _difference(layouts: Sequence[Sequence[DtypeAndShape]]) -> int:
    """Returns the first index at which the layouts differ."""
    shortest = min(map(len, layouts))
    return next((at for at in range(shortest) if len({one[at] for one in layouts}) > 1), shortest)


def spell(call: Call, at: int = 0) -> str:
    """Returns a call in words; for many tensors, their number and the layout of the one at index `at`."""
    words = [call.collective.name.lower()]
    if call.collective in REDUCING:
        words.append(call.op.name.lower())
    if call.collective in ROOTED:
        words.append(f"{'from' if call.collective in _GIVING else 'to'} rank {call.root}")
    if call.collective is Collective.GROUP:
        words.append(f"of ranks {list(call.splits)}")
    elif call.splits:
        words.append(f"split as {list(call.splits)}")
    if len(call.layouts) > _LISTED:
        here = f" (number {at}: {call.layouts[at]})" if at < len(call.layouts) else ""
        words.append(f"{len(call.layouts)} tensors{here}")
    elif call.layouts:
        words.append(", ".join(map(str, call.layouts)))
    elif call.collective in REDUCING | _BY_ROWS | _GIVING:
        words.append("without a tensor")
    return " ".join(words)


# Results.


def _reduced(given: Sequence[Tensors], op: ReduceOp) -> Tensors:
    return tuple(reduced(tensors, op) for tensors in zip(*given, strict=True))


def _concatenated(given: Sequence[Tensors]) -> Tensors:
    return tuple(
        torch.cat([tensor.reshape(tensor.shape or (1,)) for tensor in tensors])
        for tensors in zip(*given, strict=True)
    )


def _from_root(call: Call, ranks: Sequence[int], tensors: Tensors) -> dict[int, Tensors]:
    # Copies: the root can reuse its memory as soon as it has its reply.
    copies = tuple(tensor.clone() for tensor in tensors)
    if call.collective is Collective.SCATTER:
        return {rank: (tensor,) for rank, tensor in zip(ranks, copies, strict=True)}
    return {
        rank: copies if call.collective is Collective.BROADCAST or rank != call.root else () for rank in ranks
    }


def _exchanged(parts: Sequence[Part]) -> list[Tensors]:
    """Returns for each member the rows that all members send to it, and their counts."""
    splits = [rows_for(part.call, len(parts)) for part in parts]
    pieces = [torch.split(part.tensors[0], counts) for part, counts in zip(parts, splits, strict=True)]
    return [
        (
            torch.cat([row[member] for row in pieces]),
            torch.tensor([counts[member] for counts in splits], device="cpu"),
        )
        for member in range(len(parts))
    ]
