"""The gradients of one bucket, and the flat memory in which they are exchanged.

In torch a gradient is a tensor of its own: a script may keep it, view it, replace it, or drop it and find
None. All of that holds here too. A gradient moves into the flat memory once backward has made it, because an
exchange needs it there, and `parameter.grad` becomes a view. The view shows the script its own gradient, and
later the mean.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from operator import is_

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hubring.workers.buckets.conversion import check_unconverted

log = logging.getLogger(__name__)


class GradientMemory:
    """Shows flat gradients as `parameter.grad`.

    Args:
        flat: One element per element of the parameters, on their device. Exchanges write to it from any
            thread.
        parameters: The parameters, of one dtype and device.
    """

    def __init__(self, flat: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._exchanged = flat
        self._parameters = parameters
        ends = list(accumulate(parameter.numel() for parameter in parameters))
        self._parts = [slice(end - one.numel(), end) for end, one in zip(ends, parameters, strict=True)]
        self._make_views()
        self._warned = False
        self._strays: dict[int, tuple[Tensor, int]] = {}
        """Gradients that a view cannot replace, sparse or with a graph, as of the version that was copied."""

    def _make_views(self) -> None:
        # The same memory with a storage of its own, which counts only tensors that the script can reach.
        # Their versions change only by backward and by the script.
        self._flat = from_dlpack(self._exchanged.detach())
        self.views = [self._view(position) for position in range(len(self._parameters))]
        self._addresses = [view.data_ptr() for view in self.views]
        self._alone = list(map(sys.getrefcount, self.views))
        self._users = _users(self._flat)

    @property
    def changes(self) -> int:
        """Number of in-place changes by backward or the script."""
        return sum([view._version for view in self.views])

    @property
    def keeps_graphs(self) -> bool:
        """Whether a gradient has a graph, so that a backward may go through it."""
        return any(stray.requires_grad for stray, _ in self._strays.values())

    def clear(self, position: int) -> None:
        """Zeroes the memory of one parameter's gradient. It is not the script's change."""
        self._exchanged[self._parts[position]].zero_()

    def take(self, position: int) -> None:
        """Moves one parameter's gradient into the memory, if it has one."""
        self._take([position])

    def collect(self) -> bool:
        """Moves all gradients into the memory; returns whether all were there."""
        if self._all_shown():
            return True
        self._take(range(len(self.views)))
        return False

    def _take(self, positions: Iterable[int]) -> None:
        if (
            self._flat.data_ptr() != self._exchanged.data_ptr()
        ):  # model.share_memory() moves the whole storage
            self._make_views()
        moved: list[int] = []
        for position in positions:
            gradient = self._parameters[position].grad
            if gradient is None or self._is_shown(position, gradient):
                continue
            if gradient is self.views[position]:  # the script gave it other memory: gradient.data = ...
                self.views[position] = self._view(position)
            check_unconverted("a gradient", gradient, self.views[position])
            if gradient.layout is torch.strided and not gradient.requires_grad:
                moved.append(position)
                continue
            if gradient.layout is not torch.strided:
                self._warn_of_sparse(gradient)
            with torch.no_grad():
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                self.views[position].copy_(dense)
            self._strays[position] = gradient, gradient._version
        if moved:
            views = [self.views[position] for position in moved]
            torch._foreach_copy_(views, [_gradient(self._parameters[position]) for position in moved])
            for position, view in zip(moved, views, strict=True):
                self._parameters[position].grad = view

    def show(self, absent: Collection[int]) -> None:
        """Makes every `parameter.grad` show the memory; None for the `absent` ones."""
        strays, self._strays = self._strays, {}
        if not absent and not strays and self._all_views():
            return
        for position, (parameter, view) in enumerate(zip(self._parameters, self.views, strict=True)):
            stray, _ = strays.get(position, (None, 0))
            if position in absent:
                parameter.grad = None
            elif stray is not None and stray is parameter.grad:
                _fill(parameter, stray, view)
            else:
                parameter.grad = view

    def is_current(self) -> bool:
        """Whether every gradient is in the memory, or a copy of it is."""
        return self._all_shown() or all(
            parameter.grad is None or self._is_shown(position, parameter.grad)
            for position, parameter in enumerate(self._parameters)
        )

    def free(self) -> bool:
        """Gives memory of their own to gradients that the script has kept from an earlier step.

        Returns:
            False if the script holds another view of the memory, which only new memory can free.
        """
        if self._all_views():  # backward adds to the gradients in place, as in torch
            return True
        counts = map(sys.getrefcount, self.views)
        kept = [
            position
            for position, (count, alone) in enumerate(zip(counts, self._alone, strict=True))
            if count > alone and self._parameters[position].grad is not self.views[position]
        ]
        for position in kept:
            held, self.views[position] = self.views[position], self._view(position)
            held.data = held.clone()
        return _users(self._flat) <= self._users

    def replace(self, earlier: GradientMemory) -> None:
        """Shows the gradients that `earlier`, of the same parameters, shows now."""
        for parameter, view, old in zip(self._parameters, self.views, earlier.views, strict=True):
            if parameter.grad is old:
                view.copy_(old)
                parameter.grad = view
        self._strays = earlier._strays

    def _view(self, position: int) -> Tensor:
        # A tensor of its own over the same storage: torch refuses `detach_` for a view.
        flat, shape = self._flat[self._parts[position]], self._parameters[position].shape
        strides = flat.view(shape).stride()
        return flat.new_empty(0).set_(self._flat.untyped_storage(), flat.storage_offset(), shape, strides)

    def _warn_of_sparse(self, gradient: Tensor) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "the gradient of a parameter of shape %s is sparse, and is exchanged as a dense tensor of"
                " %.1f MB in"
                " every step: sparse=False gives the same training, and --compress topk:F sends less",
                list(gradient.shape),
                gradient.numel() * gradient.element_size() / 1e6,
            )

    def _is_shown(self, position: int, gradient: Tensor) -> bool:
        view = self.views[position]
        if gradient is view:
            return view.data_ptr() == self._addresses[position]
        stray, version = self._strays.get(position, (None, 0))
        return gradient is stray and gradient._version == version

    def _all_shown(self) -> bool:
        return self._all_views() and [view.data_ptr() for view in self.views] == self._addresses

    def _all_views(self) -> bool:
        return all(map(is_, [parameter.grad for parameter in self._parameters], self.views))


def _users(tensor: Tensor) -> int:
    """Returns how many tensors share a tensor's storage."""
    storage: int = tensor.untyped_storage()._cdata
    return torch._C._storage_Use_Count(storage)


def _fill(parameter: torch.nn.Parameter, stray: Tensor, mean: Tensor) -> None:
    """Makes a gradient that the view cannot replace the mean."""
    if stray.layout is torch.strided:
        stray.detach().copy_(mean)
    else:
        parameter.grad = mean.to_sparse(stray.sparse_dim())


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
