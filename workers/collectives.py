"""Collectives for scripts: every member takes part, and each gets its result.

Ranks are matched by name, and the calls under one name in the order in which
each rank makes them; calls of different names may come in different orders.
Without a name it is the operation's: ranks must then make the same calls in the
same order. All take these arguments besides their own:

    name            what ranks are matched by
    group           who takes part, from `new_group`; None: all ranks
    communicator    None: that of `workers.init()`

and all raise:

    ConfigError         members disagree in what they do, or it cannot be done with
                        the dtype; the same on all, and it says who gave what
    DeadlineExceeded    some member did not take part in time
    UsageError          the call makes no sense on this rank alone
    HubringError        what the exchange failed with

A `root` is a rank of the whole job. Tensors may be on any device; results are
on that of what was given, and new, but in forms that end in `_`. Those that end
in `_async` return at once: `wait()` for the work, from any thread, then its
`result` is there, and `get()` does both. Until then the tensors that were given
are the exchange's: do not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ps.collective import ROOTED, layout_of
from ps.errors import UsageError
from ps.messages import Call, Collective, ReduceOp
from workers import context, sparse
from workers.communicator import CollectiveWork, Communicator
from workers.group import Group


def allreduce(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Reduces the members' tensors, of one shape and dtype, to one.

    Args:
        tensor: This rank's part; only read. Any shape, 0-d too. A sparse COO tensor is summed or
            averaged by gathering what is there, and may have other places on every member.
        op: How parts become one; AVERAGE and ADASUM want a floating dtype. Of booleans
            the sum is whether any is true, and the product whether all are.
        name: What ranks are matched by.
        group: Who takes part; None: all ranks.
        communicator: None takes that of `workers.init()`.

    Returns:
        A new tensor of the same shape, dtype and device, equal on all members.
    """
    return _tensor(allreduce_async(tensor, op, name, group=group, communicator=communicator))


def allreduce_async(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `allreduce`."""
    if tensor.is_sparse:
        communicator = communicator or context.current().communicator
        then = sparse.total(tensor, op, communicator.size if group is None else group.size())
        given = sparse.parts(tensor, op)
        return _begin(Collective.ALLGATHER, given, name or "allreduce", group, communicator, then=then)
    return _begin(Collective.ALLREDUCE, [tensor], name, group, communicator, op=op)


def allreduce_(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """As `allreduce`, with the result in `tensor`, which is returned."""
    return _tensor(allreduce_async_(tensor, op, name, group=group, communicator=communicator))


def allreduce_async_(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `allreduce_`; the tensor is written before the work is done."""
    then = _into(tensor)
    return _begin(Collective.ALLREDUCE, [tensor], name, group, communicator, op=op, then=then)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """`allreduce` of many tensors, of mixed shapes and dtypes, in one exchange; results as if one by one."""
    return _tensors(grouped_allreduce_async(tensors, op, name, group=group, communicator=communicator))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `grouped_allreduce`."""
    then = _like(tensors)
    return _begin(Collective.ALLREDUCE, tensors, name, group, communicator, op=op, then=then)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """As `grouped_allreduce`, with the results in `tensors`."""
    return _tensors(grouped_allreduce_async_(tensors, op, name, group=group, communicator=communicator))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `grouped_allreduce_`."""
    then = _into(*tensors, many=True)
    return _begin(Collective.ALLREDUCE, tensors, name, group, communicator, op=op, then=then)


def allgather(
    tensor: Tensor,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Joins the members' tensors along the first dimension, which alone may vary.

    A 0-d tensor counts as one row: the result has shape (size,).
    """
    return _tensor(allgather_async(tensor, name, group=group, communicator=communicator))


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `allgather`."""
    return _begin(Collective.ALLGATHER, [tensor], name, group, communicator)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """`allgather` of many tensors in one exchange; results as if one by one."""
    return _tensors(grouped_allgather_async(tensors, name, group=group, communicator=communicator))


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `grouped_allgather`."""
    return _begin(Collective.ALLGATHER, tensors, name, group, communicator, then=_like(tensors))


def broadcast(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Gives every member the root's tensor; all pass one of its shape and dtype."""
    return _tensor(broadcast_async(tensor, root, name, group=group, communicator=communicator))


def broadcast_async(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `broadcast`."""
    then = _like([tensor], many=False)
    return _begin(Collective.BROADCAST, [tensor], name, group, communicator, root=root, then=then)


def broadcast_(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """As `broadcast`, with the result in `tensor`, which is returned."""
    return _tensor(broadcast_async_(tensor, root, name, group=group, communicator=communicator))


def broadcast_async_(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `broadcast_`."""
    then = _into(tensor)
    return _begin(Collective.BROADCAST, [tensor], name, group, communicator, root=root, then=then)


def reduce(
    tensor: Tensor,
    root: int = 0,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor | None:
    """As `allreduce`, for the root alone: the others get None."""
    result: Tensor | None = reduce_async(tensor, root, op, name, group=group, communicator=communicator).get()
    return result


def reduce_async(
    tensor: Tensor,
    root: int = 0,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `reduce`."""
    return _begin(Collective.REDUCE, [tensor], name, group, communicator, op=op, root=root)


def gather(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor] | None:
    """The members' tensors, in rank order, for the root; None elsewhere. Their first dimension may vary."""
    result: list[Tensor] | None = gather_async(
        tensor, root, name, group=group, communicator=communicator
    ).get()
    return result


def gather_async(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `gather`."""
    device = tensor.device

    def then(came: Sequence[Tensor]) -> list[Tensor] | None:
        return [one.to(device) for one in came] or None

    return _begin(Collective.GATHER, [tensor], name, group, communicator, root=root, then=then)


def scatter(
    tensors: Sequence[Tensor] | None,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Gives each member one of the root's tensors, of any shapes and dtypes, in rank order.

    Args:
        tensors: On the root one for each member; None elsewhere.
        root: Who gives.
        name: What ranks are matched by.
        group: Who takes part; None: all ranks.
        communicator: None takes that of `workers.init()`.

    Returns:
        This rank's; on the CPU where it is not the root.
    """
    return _tensor(scatter_async(tensors, root, name, group=group, communicator=communicator))


def scatter_async(
    tensors: Sequence[Tensor] | None,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `scatter`."""
    return _begin(Collective.SCATTER, tensors or [], name, group, communicator, root=root)


def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """This member's rows of what `allreduce` would give; the first get one more where they do not divide."""
    return _tensor(reduce_scatter_async(tensor, op, name, group=group, communicator=communicator))


def reduce_scatter_async(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `reduce_scatter`."""
    return _begin(Collective.REDUCE_SCATTER, [tensor], name, group, communicator, op=op)


def grouped_reduce_scatter(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """`reduce_scatter` of many tensors in one exchange; results as if one by one."""
    return _tensors(grouped_reduce_scatter_async(tensors, op, name, group=group, communicator=communicator))


def grouped_reduce_scatter_async(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `grouped_reduce_scatter`."""
    then = _like(tensors)
    return _begin(Collective.REDUCE_SCATTER, tensors, name, group, communicator, op=op, then=then)


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> tuple[Tensor, Tensor]:
    """Sends each member some of this rank's rows.

    Args:
        tensor: Rows for the first member, then for the second, and so on. Members may have
            differently many; all other dimensions and the dtype are the same.
        splits: How many rows are for each member; None: equally many.
        name: What ranks are matched by.
        group: Who takes part; None: all ranks.
        communicator: None takes that of `workers.init()`.

    Returns:
        The rows that came, in rank order, and how many from each member (int64).
    """
    output, received = alltoall_async(tensor, splits, name, group=group, communicator=communicator).get()
    return output, received


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `alltoall`; the result is a pair."""
    counts = () if splits is None else tuple(map(int, splits))
    device = tensor.device

    def then(came: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        output, received = came
        return output.to(device), received.to(device)

    return _begin(Collective.ALLTOALL, [tensor], name, group, communicator, splits=counts, then=then)


def send(
    tensor: Tensor,
    to: int,
    name: str | None = None,
    *,
    communicator: Communicator | None = None,
) -> None:
    """Sends a tensor to one rank; returns once that one has called `recv`."""
    send_async(tensor, to, name, communicator=communicator).wait()


def send_async(
    tensor: Tensor,
    to: int,
    name: str | None = None,
    *,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `send`."""
    communicator = communicator or context.current().communicator
    return _transfer([tensor], communicator.rank, to, name, communicator)


def recv(source: int, name: str | None = None, *, communicator: Communicator | None = None) -> Tensor:
    """The tensor that one rank sends here under this name, on the CPU; shape and dtype travel along.

    Those under one name come in the order in which they were sent.
    """
    return _tensor(recv_async(source, name, communicator=communicator))


def recv_async(
    source: int, name: str | None = None, *, communicator: Communicator | None = None
) -> CollectiveWork:
    """Begins `recv`."""
    communicator = communicator or context.current().communicator
    return _transfer([], source, communicator.rank, name, communicator)


def barrier(
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> None:
    """Returns once every member has called it, this rank's last step's exchange over."""
    if communicator is None:
        context.current().synchronize()
    barrier_async(name, group=group, communicator=communicator).wait()


def barrier_async(
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `barrier`, without a word on the last step's exchange."""
    return _begin(Collective.BARRIER, [], name, group, communicator)


def join(*, communicator: Communicator | None = None) -> int:
    """Says that this rank has no more data, and returns once all have said so.

    Until then it takes part in what the others do: with zeros in reductions, where it counts in
    an average too, and without rows in what is gathered. What it began before is done first.

    Returns:
        The rank that was the last to join, the same on all.
    """
    return int(join_async(communicator=communicator).get())


def join_async(*, communicator: Communicator | None = None) -> CollectiveWork:
    """Begins `join`; nothing else may be called until it is done."""
    return _begin(Collective.JOIN, [], None, None, communicator, then=lambda came: int(came[0]))


def new_group(ranks: Collection[int], *, communicator: Communicator | None = None) -> Group:
    """Makes a group of some ranks; every rank of the job calls it, with the same ones, members or not.

    Groups of the same ranks are one: calls in them meet.

    Raises:
        UsageError: A rank is named twice, or there is none of that number.
        ConfigError: The ranks name different members.
    """
    communicator = communicator or context.current().communicator
    group = Group(ranks, communicator.rank, communicator.size)
    communicator.collective(Call(Collective.GROUP, "new_group", splits=group.ranks)).wait()
    if group.included() and group.members:
        communicator.open_group(group.members)
    return group


def remove_group(group: Group, *, communicator: Communicator | None = None) -> None:
    """Gives a group back, on every rank of the job; what is still under way in it may fail.

    Raises:
        UsageError: It was removed before.
        ConfigError: The ranks name different groups.
    """
    if group.removed:
        raise UsageError(f"{group} was removed before; remove it once")
    communicator = communicator or context.current().communicator
    communicator.collective(Call(Collective.GROUP, "remove_group", splits=group.ranks)).wait()
    group.removed = True
    if group.included() and group.members:
        communicator.close_group(group.members)


def broadcast_into(
    tensors: Sequence[Tensor], communicator: Communicator, name: str, timeout: float | None
) -> None:
    """Overwrites tensors of any dtype with rank 0's, in one broadcast of their bytes."""
    if communicator.size == 1 or not tensors:
        return
    given = [torch.cat([_as_bytes(tensor).cpu() for tensor in tensors])] if communicator.rank == 0 else []
    whole = communicator.collective(Call(Collective.BROADCAST, name), *given).get(timeout)
    start = 0
    for tensor in tensors:
        piece = whole[start : start + tensor.nbytes]
        # A fresh copy: bytes in the middle of a tensor may be unaligned for a wider dtype.
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# How a call begins, and what is made of what comes.


def _begin(
    collective: Collective,
    tensors: Sequence[Tensor],
    name: str | None,
    group: Group | None,
    communicator: Communicator | None,
    *,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
    splits: tuple[int, ...] = (),
    then: Callable[[Sequence[Tensor]], Any] | None = None,
) -> CollectiveWork:
    communicator = communicator or context.current().communicator
    _check_group(group, communicator)
    if collective in ROOTED:
        _check_root(root, group, communicator)
    ranks = group.members if group is not None else ()
    call = Call(collective, name or collective.name.lower(), op, root, ranks, splits)
    if root != communicator.rank and collective is Collective.BROADCAST:
        # Only the root's travels; that the others expect the same is compared.
        call = Call(collective, call.name, op, root, ranks, splits, tuple(map(layout_of, tensors)))
        tensors = []
    return communicator.collective(call, *tensors, then=then)


def _check_group(group: Group | None, communicator: Communicator) -> None:
    if group is None:
        return
    if group.removed:
        raise UsageError(f"{group} was removed: make a new one")
    if not group.included():
        raise UsageError(f"rank {communicator.rank} is none of {group}: let its members call alone")


def _check_root(root: int, group: Group | None, communicator: Communicator) -> None:
    if not 0 <= root < communicator.size:
        raise UsageError(f"root is {root}; ranks are 0 to {communicator.size - 1}")
    if group is not None and root not in group.ranks:
        raise UsageError(f"root is {root}, which is none of {group}; roots are ranks of the whole job")


def _transfer(
    tensors: Sequence[Tensor], source: int, to: int, name: str | None, communicator: Communicator
) -> CollectiveWork:
    other = to if source == communicator.rank else source
    if other == communicator.rank or not 0 <= other < communicator.size:
        allowed = f"from 0 to {communicator.size - 1}, but not rank {communicator.rank} itself"
        raise UsageError(f"there is no sending between rank {source} and rank {to}; allowed is any {allowed}")
    # Both directions may be under way under one name.
    spelt = f"{name or 'transfer'} from {source} to {to}"
    call = Call(Collective.TRANSFER, spelt, root=source, ranks=tuple(sorted((source, to))))
    return communicator.collective(call, *tensors)


def _into(*tensors: Tensor, many: bool = False) -> Callable[[Sequence[Tensor]], Any]:
    """Overwrites what was given, and hands it out."""

    def then(came: Sequence[Tensor]) -> Any:
        for tensor, one in zip(tensors, came, strict=True):
            tensor.detach().copy_(one)
        return list(tensors) if many else tensors[0]

    return then


def _like(tensors: Sequence[Tensor], *, many: bool = True) -> Callable[[Sequence[Tensor]], Any]:
    """Brings each to the device of the one that was given."""
    devices = [tensor.device for tensor in tensors]

    def then(came: Sequence[Tensor]) -> Any:
        results = [one.to(device) for one, device in zip(came, devices, strict=True)]
        return results if many else results[0]

    return then


def _tensor(work: CollectiveWork) -> Tensor:
    result: Tensor = work.get()
    return result


def _tensors(work: CollectiveWork) -> list[Tensor]:
    results: list[Tensor] = work.get()
    return results
