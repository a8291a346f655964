"""Groups of ranks: how any collective among them starts, barriers, and joins (the end of uneven data)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

from torch import Tensor

from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.store.collective import ROOTED, layout_of
from hubring.workers.communicators.base import CollectiveWork, Communicator, check_tensors
from hubring.workers.runtime import context

__all__ = ["Group", "barrier", "barrier_async", "join", "join_async", "new_group", "remove_group"]

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Group:
    """A group of ranks, made by `hubring.new_group`.

    Attributes:
        ranks: The members' ranks in the job, ascending.
        removed: Whether `hubring.remove_group` was called. A removed group cannot be used.
    """

    def __init__(self, ranks: Collection[int], own: int, size: int) -> None:
        if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
            raise UsageError(
                f"invalid group of ranks {list(ranks)}: pass one or more different ranks from 0 to {size - 1}"
            )
        self.ranks = tuple(sorted(ranks))
        self.removed = False
        self._own = own
        self._has_all = len(self.ranks) == size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks as a `Call` has them: empty for all ranks."""
        return () if self._has_all else self.ranks

    def rank(self) -> int:
        """Returns this worker's rank within the group, from 0.

        Raises:
            UsageError: This worker is not a member.
        """
        if not self.included():
            raise UsageError(f"rank {self._own} is not in {self}: check included() first")
        return self.ranks.index(self._own)

    def size(self) -> int:
        """Returns the number of members."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this worker is a member."""
        return self._own in self.ranks

    def __str__(self) -> str:
        return f"the group of ranks {list(self.ranks)}"


_caller = threading.local()
"""`waits` is set while a thread starts a collective that it waits for next."""


class Scope(TypedDict, total=False):
    """The members of a collective.

    Attributes:
        group: A group of ranks; None: all ranks.
        communicator: Connects the ranks; None: the communicator of `hubring.init()`.
    """

    group: Group | None
    communicator: Communicator | None


def begin(
    collective: Collective,
    tensors: Sequence[Tensor],
    name: str | None,
    scope: Scope,
    *,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
    splits: tuple[int, ...] = (),
    then: Callable[[Sequence[Tensor]], Any] | None = None,
) -> CollectiveWork:
    """Starts a collective of these tensors. See `Communicator.collective` for `then`.

    Raises:
        TypeError: `scope` has anything else than a group and a communicator.
        UsageError: This rank or the root is not in the group, or the group was removed.
    """
    if unknown := scope.keys() - Scope.__optional_keys__:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; expected group or communicator")
    group, communicator = scope.get("group"), scope.get("communicator") or context.current().communicator
    _check_group(group, communicator)
    if collective in ROOTED:
        _check_root(root, group, communicator)
    ranks = group.members if group is not None else ()
    call = Call(collective, name or collective.name.lower(), op, root, ranks, splits)
    if root != communicator.rank and collective in (Collective.BROADCAST, Collective.SCATTER):
        # Only the root sends tensors. In a broadcast the other ranks' layouts are compared with its.
        check_tensors(call.name, tensors)
        if collective is Collective.BROADCAST:
            call = replace(call, layouts=tuple(map(layout_of, tensors)))
        tensors = []
    return communicator.collective(call, *tensors, then=then, waits=getattr(_caller, "waits", False))


def _check_group(group: Group | None, communicator: Communicator) -> None:
    if group is None:
        return
    if group.removed:
        raise UsageError(f"{group} was removed: make a new group")
    if not group.included():
        raise UsageError(f"rank {communicator.rank} is not in {group}: call this only on its members")


def _check_root(root: int, group: Group | None, communicator: Communicator) -> None:
    if not 0 <= root < communicator.size:
        raise UsageError(f"root is {root}; it must be 0 to {communicator.size - 1}")
    if group is not None and root not in group.ranks:
        raise UsageError(f"root is {root}, which is not in {group}; pass the root's rank in the whole job")


def into(*tensors: Tensor, many: bool = False) -> Callable[[Sequence[Tensor]], Any]:
    """Returns a function that writes the results to `tensors` and returns these."""

    def then(came: Sequence[Tensor]) -> Any:
        for tensor, one in zip(tensors, came, strict=True):
            tensor.detach().copy_(one)
        return list(tensors) if many else tensors[0]

    return then


def like(tensors: Sequence[Tensor], *, many: bool = True) -> Callable[[Sequence[Tensor]], Any]:
    """Returns a function that moves each result to the device of its input."""

    def then(came: Sequence[Tensor]) -> Any:
        results = [one.to(tensor.device) for one, tensor in zip(came, tensors, strict=True)]
        return results if many else results[0]

    return then


def tensor_of(work: CollectiveWork) -> Tensor:
    """Waits for a work and returns its result, a tensor."""
    result: Tensor = work.get()
    return result


def tensors_of(work: CollectiveWork) -> list[Tensor]:
    """Waits for a work and returns its result, a list of tensors."""
    results: list[Tensor] = work.get()
    return results


def waiting(start: Callable[P, S], finish: Callable[[S], T]) -> Callable[P, T]:
    """Returns the form of a collective that waits for its result.

    Args:
        start: The form that returns at once; its name has `_async`.
        finish: Waits for what `start` returns, and returns the result.
    """

    @wraps(start)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        _caller.waits = True
        try:
            work = start(*args, **kwargs)
        finally:
            _caller.waits = False
        return finish(work)

    result = signature(finish).return_annotation
    wait.__signature__ = signature(start).replace(return_annotation=result)  # type: ignore[attr-defined]
    wait.__name__ = wait.__qualname__ = start.__name__.replace("_async", "")  # pickle looks it up by this
    wait.__doc__ = f"{start.__doc__}\n\n    Waits for it, and returns the result."
    return wait


def barrier(name: str | None = None, **scope: Unpack[Scope]) -> None:
    """Returns once every member has called it. First waits for the exchange of this rank's last step."""
    if scope.get("communicator") is None:
        context.current().synchronize()
    barrier_async(name, **scope).wait()


def barrier_async(name: str | None = None, **scope: Unpack[Scope]) -> CollectiveWork:
    """Starts `barrier`, without waiting for the exchange of the last step."""
    return begin(Collective.BARRIER, [], name, scope)


def join(*, communicator: Communicator | None = None) -> int:
    """Declares that this rank has no more data. Returns once all ranks have joined.

    Until then the rank takes part in the other ranks' `allreduce` and `reduce` with zeros, which count
    in an average, and in their barriers. Any other collective would miss this rank's part, so it raises
    ConfigError on the ranks that call it. Collectives that this rank started before finish first.

    Returns:
        The last rank to join, the same on all ranks.
    """
    return int(join_async(communicator=communicator).get())


def join_async(*, communicator: Communicator | None = None) -> CollectiveWork:
    """Starts `join`. Call no other collective until it is done."""
    return begin(Collective.JOIN, [], None, {"communicator": communicator}, then=lambda came: int(came[0]))


def new_group(ranks: Collection[int], *, communicator: Communicator | None = None) -> Group:
    """Makes a group of some ranks. Every rank of the job must call it with the same `ranks`.

    Groups with the same ranks are equivalent: their calls match each other.

    Raises:
        UsageError: `ranks` is empty, repeats a rank, or has a rank that does not exist.
        ConfigError: The callers pass different ranks.
    """
    communicator = communicator or context.current().communicator
    group = Group(ranks, communicator.rank, communicator.size)
    communicator.collective(Call(Collective.GROUP, "new_group", splits=group.ranks)).wait()
    if group.included() and group.members:
        communicator.open_group(group.members)
    return group


def remove_group(group: Group, *, communicator: Communicator | None = None) -> None:
    """Removes a group once the collectives that all members started are done. Every rank must call it.

    A collective that only some members started fails, or waits until its deadline.

    Raises:
        UsageError: The group was already removed.
        ConfigError: The callers pass different groups.
    """
    if group.removed:
        raise UsageError(f"{group} was already removed: call remove_group() once")
    communicator = communicator or context.current().communicator
    communicator.collective(Call(Collective.GROUP, "remove_group", splits=group.ranks)).wait()
    group.removed = True
    if group.included() and group.members:
        call = Call(Collective.BARRIER, "remove_group", ranks=group.members)
        communicator.collective(call).wait()
        communicator.close_group(group.members)
