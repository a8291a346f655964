"""The gradients of one bucket, and the flat memory in which they are exchanged.

In torch a gradient is a tensor of its own: a script may keep it, view it, replace it, or drop it and find
None. All of that holds here too. A gradient moves into the flat memory once backward has made it, because an
exchange needs it there, and `parameter.grad` becomes a view. The view shows the script its own gradient, and
later the mean.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from operator import attrgetter, gt, is_

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.torch_internals import (
    copy_each,
    reals,
    references,
    storage_address,
    users_at,
    version,
)
from hubring.workers.buckets.value_memory import BITS

log = logging.getLogger(__name__)

SAMPLE = 4
"""Elements of each gradient that a sample has."""

_gradient = attrgetter("grad")  # with `map` it makes a list without a call of Python for each parameter


class GradientMemory:
    """Shows flat gradients as `parameter.grad`.

    Args:
        flat: One element per real number of the parameters, on their device. Exchanges write to it from any
            thread.
        parameters: The parameters, of one dtype and device.

    Attributes:
        views: The view for each `parameter.grad`, in the order of the parameters.
    """

    def __init__(self, flat: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._exchanged = flat
        self._parameters = parameters
        self._dtype = next((one.dtype for one in parameters), flat.dtype)
        ends = list(accumulate(map(reals, parameters)))
        self._parts = [slice(end - reals(one), end) for end, one in zip(ends, parameters, strict=True)]
        self._make_views()
        self._warned = False
        self._bits = flat.detach().view(BITS[flat.itemsize])
        spread = [
            part.start + (part.stop - part.start - 1) * n // (SAMPLE - 1)
            for part in self._parts
            if part.stop > part.start
            for n in range(SAMPLE)
        ]
        self._spread = torch.tensor(spread, dtype=torch.int64, device=flat.device)
        self._strays: dict[int, tuple[Tensor, int]] = {}
        """Gradients that a view cannot replace, sparse or with a graph, as of the version that was copied."""

    def _make_views(self) -> None:
        # The same memory, with a storage for each gradient: `torch.save` writes a whole storage. It counts
        # only tensors that the script can reach. Their versions change only by backward and by the script.
        self._storages = list(map(self._storage, self._parts))
        self.views = [self._view(position) for position in range(len(self._parameters))]
        self._addresses = [view.data_ptr() for view in self.views]
        self._alone = list(map(references, self.views))
        self._users = list(map(users_at, map(storage_address, self._storages)))

    def state(self) -> tuple[int, tuple[int, ...]]:
        """Returns the number of in-place changes by backward or the script, and the `missing` positions."""
        return sum(map(version, self.views)), () if self._all_views() else self.missing()

    def is_in(self, state: tuple[int, tuple[int, ...]]) -> bool:
        """Whether nothing has changed since `state()`, and every gradient is still in the memory."""
        if not state[1] and self._all_shown():
            return sum(map(version, self.views)) == state[0]
        return self.state() == state and self.is_current()

    def sample(self) -> Tensor:
        """Returns the bits of some elements of every gradient.

        They show most changes that torch does not count, such as `.grad.data.mul_(...)`, and not all.
        """
        return self._bits.take(self._spread)

    def altered(self, state: tuple[int, tuple[int, ...]], copy: Tensor | None) -> int:
        """Returns how many gradients are not those of a `state()` with a copy of the memory."""
        bits, count = self._bits if copy is None else copy.view(self._bits.dtype), 0
        for position, (one, part) in enumerate(zip(self._parameters, self._parts, strict=True)):
            if one.grad is None or position in state[1]:
                count += (one.grad is None) != (position in state[1])
            else:
                here = one.grad is self.views[position] or self._is_stray(position, one.grad)
                count += not (here and torch.equal(bits[part], self._bits[part]))
        return count

    def missing(self) -> tuple[int, ...]:
        """Returns the positions of the parameters without a gradient now."""
        return tuple(position for position, one in enumerate(self._parameters) if one.grad is None)

    @property
    def keeps_graphs(self) -> bool:
        """Whether a gradient has a graph, so that a backward may go through it."""
        return any(stray.requires_grad for stray, _ in self._strays.values())

    def clear(self, position: int) -> None:
        """Zeroes the memory of one parameter's gradient. It is not the script's change."""
        self._exchanged[self._parts[position]].zero_()

    def collect(self) -> bool:
        """Moves all gradients into the memory; returns whether all were there."""
        if self._all_shown():
            return True
        self.take(range(len(self.views)))
        return False

    def take(self, positions: Iterable[int]) -> None:
        """Moves some parameters' gradients into the memory, if they have one."""
        moved: list[int] = []
        for position in positions:
            gradient, view = self._parameters[position].grad, self.views[position]
            if (
                view.data_ptr() != self._addresses[position]
            ):  # the script gave it other memory: gradient.data = ..., model.share_memory()
                if self._storages[position].data_ptr() != self._addresses[position]:
                    self._storages[position] = self._storage(self._parts[position])
                view = self.views[position] = self._view(position)
            if gradient is None or (self._strays and self._is_stray(position, gradient)):
                continue
            if gradient is view:
                continue
            if (gradient.shape, gradient.dtype, gradient.device) != (view.shape, view.dtype, view.device):
                check_unconverted("a gradient", gradient, view)
            if gradient.layout is torch.strided and not gradient.requires_grad:
                moved.append(position)
            else:
                self._copy_stray(position, gradient)
        if moved:
            views = list(map(self.views.__getitem__, moved))
            parameters = list(map(self._parameters.__getitem__, moved))
            copy_each(views, list(map(_gradient, parameters)))
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view

    def _copy_stray(self, position: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            self._warn_of_sparse(gradient)
        with torch.no_grad():
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            self.views[position].copy_(dense)
        self._strays[position] = gradient, version(gradient)

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
            one.grad is None
            or (one.grad is view and view.data_ptr() == self._addresses[position])
            or self._is_stray(position, one.grad)
            for position, (one, view) in enumerate(zip(self._parameters, self.views, strict=True))
        )

    def free(self) -> bool:
        """Gives memory of their own to gradients that the script has kept from an earlier step.

        Returns:
            False if the script holds another view of the memory, which only new memory can free.
        """
        if self._all_views():  # backward adds to the gradients in place, as in torch
            return True
        counts = list(map(references, self.views))
        if counts != self._alone:
            for position, (count, alone) in enumerate(zip(counts, self._alone, strict=True)):
                if count > alone and self._parameters[position].grad is not self.views[position]:
                    held, self.views[position] = self.views[position], self._view(position)
                    held.data = held.clone()
        return not any(map(gt, map(users_at, map(storage_address, self._storages)), self._users))

    def replace(self, earlier: GradientMemory) -> None:
        """Shows the gradients that `earlier`, of the same parameters, shows now."""
        for parameter, view, old in zip(self._parameters, self.views, earlier.views, strict=True):
            if parameter.grad is old:
                view.copy_(old)
                parameter.grad = view
        self._strays = earlier._strays

    def _view(self, position: int) -> Tensor:
        # A tensor of its own over the same storage: torch refuses `detach_` for a view.
        flat, shape = self._exchanged[self._parts[position]], self._parameters[position].shape
        pairs = (2,) if self._dtype.is_complex else ()
        strides = [
            stride // (1 + len(pairs)) for stride in flat.view([*shape, *pairs]).stride()[: len(shape)]
        ]
        return flat.new_empty(0, dtype=self._dtype).set_(self._storages[position], 0, shape, strides)

    def _storage(self, part: slice) -> torch.UntypedStorage:
        return from_dlpack(self._exchanged[part].detach()).untyped_storage()

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

    def _is_stray(self, position: int, gradient: Tensor) -> bool:
        stray, copied = self._strays.get(position, (None, 0))
        return gradient is stray and version(gradient) == copied

    def _all_shown(self) -> bool:
        return (
            all(map(is_, map(_gradient, self._parameters), self.views))
            and list(map(Tensor.data_ptr, self.views)) == self._addresses
        )

    def _all_views(self) -> bool:
        return all(map(is_, map(_gradient, self._parameters), self.views))


def _fill(parameter: torch.nn.Parameter, stray: Tensor, mean: Tensor) -> None:
    """Makes a gradient that the view cannot replace the mean."""
    if stray.layout is torch.strided:
        stray.detach().copy_(mean)
    else:
        parameter.grad = mean.to_sparse(stray.sparse_dim())


def check_unconverted(name: str, now: Tensor, then: Tensor) -> None:
    """Checks that a tensor still has its shape, dtype and device.

    Args:
        name: The tensor's name in the error.
        now: The tensor.
        then: Any tensor with the shape, dtype and device that it had in the constructor.

    Raises:
        ConfigError: It does not.
    """
    if (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
        raise ConfigError(
            f"{name} was moved or converted after DistributedOptimizer was made: it is {_described(now)}, and"
            f" was {_described(then)}; call model.to(...), .half(), .double() and similar methods before you"
            " make DistributedOptimizer"
        )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
