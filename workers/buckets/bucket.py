"""A flat bucket of parameters and gradients that are exchanged together.

A bucket's gradients are exchanged in one flat tensor. Backward makes each gradient in memory of its own, as
in torch; `collect` moves it into the flat tensor and makes `parameter.grad` a view of it. Where the hub
steps, the parameters are views of another flat tensor too, into which its answers are written; where workers
step, they stay where the script put them.

Invariant: when a bucket is sent, `bucket.gradients` holds every `parameter.grad`, which is a view of it
unless a view cannot replace the tensor. It is None if the parameter is in `bucket.absent`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec
from hubring.workers.buckets.conversion import check_unconverted
from hubring.workers.buckets.gradient_memory import GradientMemory
from hubring.workers.buckets.staging import Staging
from hubring.workers.buckets.value_memory import Look, OwnValues, ValueMemory, nothing

PARITIES = 2
"""Numbers at the end of `Bucket.presence`."""


class Bucket:
    """Parameters of one group, dtype and device that are exchanged together.

    Attributes:
        spec: Names, shapes and dtype, which all ranks and the hub agree on.
        parameters: The parameters, in the order of `spec.tensors`.
        gradients: Flat, on the parameters' device.
        values: Flat, on the parameters' device. Where the hub steps, every `parameter.data` is a view of it.
            Where workers step, it has a copy of the parameters until `hand_out`.
        landing: As `values`, but what the communicator writes to. Without the script's changes.
        absent: Positions of the parameters without a gradient: on this rank when the bucket is sent, on every
            rank once the answer has arrived. Their part of `gradients` is zeros.
        presence: Where all ranks' gradients are summed in place, one number per parameter behind the
            gradients, which is not zero if some rank has a gradient; and at the end a number that is not zero
            if some rank is in an even step, and one for an odd step. So it does not matter how sums round.
        stage: Moves the bucket between the parameters' device and host memory.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        memory: torch.Tensor,
        values: ValueMemory,
        staging: Staging,
    ) -> None:
        """Makes a bucket.

        Args:
            spec: See `spec`.
            parameters: See `parameters`.
            memory: Flat: `spec.numel` elements of gradients, and behind them `presence`, or nothing.
            values: Flat memory with `spec.numel` elements, or none.
            staging: Makes the stage.
        """
        self.spec = spec
        self.parameters = tuple(parameters)
        self.absent: frozenset[int] = frozenset()
        self._moved: dict[int, torch.Tensor] = {}
        """Parameters whose memory is the script's, by position: what the script has seen of them last."""
        self._looks = 0
        self.staging = staging
        self._hold(values)
        self._set(memory)

    def use(self, memory: torch.Tensor) -> None:
        """Exchanges gradients in this memory from now on; see `__init__`. Current gradients move there."""
        earlier = self._shown
        self._set(memory)
        self._shown.replace(earlier)

    def _hold(self, values: ValueMemory) -> None:
        self._values = values
        self.values, self.landing = values.seen, values.landing
        parameters = self.parameters if values.seen.numel() else ()
        self._value_views = _views(self.values, parameters)
        self._landing_views = _views(self.landing, parameters)
        self._places = [_place(view) for view in self._value_views]
        self._ends = list(accumulate(view.nbytes for view in self._value_views))

    def _set(self, memory: torch.Tensor) -> None:
        numel = self.spec.numel
        self.memory = memory
        self.gradients = memory[:numel]
        self.presence = memory[numel:] if memory.numel() > numel else None
        self._shown = GradientMemory(self.gradients, self.parameters)
        self.stage = self.staging.stage(self.gradients, self.landing, self._values.forget)

    @property
    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters with their names."""
        names = (tensor.name for tensor in self.spec.tensors)
        return zip(names, self.parameters, strict=True)

    # Values.

    def move_in(self) -> None:
        """Moves the parameters into `values`.

        Those that are not contiguous, such as channels_last weights, stay in place and keep their strides:
        the hub and its files have all elements in order. So do those that other tensors of the script show.
        """
        self.copy_in()
        self._values.forget()  # the copy is not the script's change
        users = Counter(_storage(parameter) for parameter in self.parameters)
        for position, (parameter, view) in enumerate(zip(self.parameters, self._value_views, strict=True)):
            storage = parameter.untyped_storage()
            shown = torch._C._storage_Use_Count(storage._cdata) - 1 > users[_storage(parameter)]
            if shown or not parameter.is_contiguous():
                self._moved[position] = parameter.detach().clone()
            else:
                parameter.data = view

    def copy_in(self) -> None:
        """Copies the parameters to `landing`."""
        for parameter, view in zip(self.parameters, self._landing_views, strict=True):
            view.copy_(parameter.data)

    def hand_out(self) -> None:
        """Copies `values` to the parameters, and gives up `values`."""
        for parameter, view in zip(self.parameters, self._value_views, strict=True):
            parameter.data.copy_(view)
        self._hold(OwnValues(self.values.new_empty(0)))
        self.stage.give_up_values()

    def _written_elsewhere(self) -> list[int]:
        """Returns the positions of the parameters that changed because the script gave them other memory.

        They stay in that memory, `parameter.data = ...`, since other tensors of the script may show it. Their
        part of `values` stays too, since the script may have kept it, to put it back.

        Raises:
            ConfigError: A parameter has another shape, dtype or device, or the whole bucket has other memory.
        """
        if [_place(one) for one in self.parameters] == self._places:
            self._moved.clear()
            return []
        changed = []
        pairs = zip(self.spec.tensors, self.parameters, self._value_views, self._places, strict=True)
        for position, (tensor, parameter, view, place) in enumerate(pairs):
            if _place(parameter) == place:
                self._moved.pop(position, None)
                continue
            if parameter.data_ptr() == place[0]:  # other strides over the same memory: a transposed matrix
                parameter.data = parameter.data.clone()
            if view.data_ptr() != place[0]:
                raise ConfigError(
                    f"parameter {tensor.name} was moved into shared memory after DistributedOptimizer was"
                    " made, where the hub's answers do not arrive: call model.share_memory() before you make"
                    " DistributedOptimizer, or share a copy, copy.deepcopy(model).share_memory()"
                )
            check_unconverted(f"parameter {tensor.name}", parameter, view)
            if position not in self._moved:
                self._moved[position] = torch.empty_like(parameter.data).copy_(view)
            # Compared with what it was, since an answer that has landed already shows in the view.
            if not torch.equal(parameter.data, self._moved[position]):
                changed.append(position)
        return changed

    def show_values(self) -> None:
        """Copies an answer to the parameters that the script has given memory of their own."""
        for position, seen in self._moved.items():
            seen.copy_(self._value_views[position])
            self.parameters[position].data.copy_(seen)

    def written(self) -> list[int]:
        """Returns the positions in `parameters` of those that the script changed since the last answer.

        Any write counts that changed a byte of `values`: through `.data`, NumPy, a kept view or native code.
        Empty where workers step, because nothing overwrites changes there. Ask before the bucket is sent.
        On the CPU, neighbors of a changed parameter count too after the next answer has landed.

        It takes microseconds where nothing changed. On a GPU it waits for the device.
        """
        if not self._places:
            return []
        return sorted({*self._written_elsewhere(), *self._values.written(self._ends)})

    def take_written(self) -> list[int]:
        """Returns what `written` does, and makes `values` all that the script has made of the parameters."""
        positions = self.written()
        for position in self._moved.keys() & positions:
            current = self.parameters[position].data
            self._value_views[position].copy_(current)
            self._moved[position].copy_(current)
        return positions

    def look_for_writes(self) -> Look:
        """Starts to look whether the script has changed parameters; see `ValueMemory.look`."""
        if not self._places:
            return nothing
        if self._written_elsewhere():
            return lambda: True
        return self._values.look()

    def forget_writes(self) -> None:
        """Drops the script's changes: `values` is what landed last. `stage.arrive` does the same."""
        self._values.forget()

    @property
    def host_gradients(self) -> torch.Tensor:
        """The gradients in host memory: `gradients` itself on the CPU."""
        return self.stage.gradients

    @property
    def host_values(self) -> torch.Tensor:
        """The host memory in which new values land: `landing` itself on the CPU."""
        return self.stage.values

    # Gradients.

    @property
    def gradient_views(self) -> Sequence[torch.Tensor]:
        """The view for each `parameter.grad`, in the order of `parameters`."""
        return self._shown.views

    @property
    def changes(self) -> int:
        """Number of in-place changes of gradients by backward or the script; exchanges do not count."""
        return self._shown.changes

    @property
    def keeps_graphs(self) -> bool:
        """Whether a gradient has a graph, so that a backward may go through it."""
        return self._shown.keeps_graphs

    def free(self) -> bool:
        """Keeps the next gradients from overwriting what the script kept from an earlier step.

        Returns:
            False if the script holds a view of this bucket's memory: the bucket must `use` other memory.
        """
        return self._shown.free()

    def take(self, position: int) -> None:
        """Moves one parameter's gradient into the bucket, if it has one."""
        self._shown.take(position)

    def collect(self) -> None:
        """Moves all gradients into the bucket."""
        self._shown.collect()

    def seal(self, left_out: frozenset[int] = frozenset(), steps: int = 0) -> None:
        """Prepares the bucket to be sent: collects all gradients and notes which are absent.

        Args:
            left_out: Positions of parameters that are not to be stepped, whatever their gradient.
            steps: Completed steps.
        """
        missing = () if self._shown.collect() else self.missing()
        for position in missing:
            self._shown.clear(position)
        self.absent = left_out.union(missing)
        if self.presence is not None:
            self.presence.fill_(1)
            for position in missing:
                self.presence[position] = 0
            self.presence[len(self.parameters) + (steps + 1) % PARITIES] = 0

    def learn_absent(self) -> None:
        """Makes `absent` the parameters without a gradient on every rank, once the mean has arrived.

        Raises:
            ConfigError: Some rank's gradients are those of another step.
        """
        if self.presence is None:
            return
        # On a GPU a look waits for the device, so without need only every hundredth step takes one.
        self._looks += 1
        if not self.absent and self.presence.is_cuda and self._looks % 100:
            return
        if not self.absent:
            even, odd = self.presence[-PARITIES:].tolist()
        else:
            *shares, even, odd = self.presence.tolist()
            self.absent = frozenset(position for position, share in enumerate(shares) if not share)
        if even and odd:
            raise ConfigError(
                f"the gradients of {self.spec.tensors[0].name} were averaged with those of another step,"
                " because some rank ran backward more often than the others: run backward equally often on"
                " all ranks, and compute a gradient that only one rank needs with torch.autograd.grad"
            )

    def show_means(self) -> None:
        """Makes every `parameter.grad` the mean that has arrived; None if no rank had one."""
        self._shown.show(self.absent)

    def missing(self) -> tuple[int, ...]:
        """Returns the positions of the parameters without a gradient now."""
        return tuple(position for position, one in enumerate(self.parameters) if one.grad is None)

    def holds_gradients(self) -> bool:
        """Whether every gradient is still the one that `collect` or `seal` saw."""
        return self._shown.is_current()

    @contextmanager
    def lent_gradients(self) -> Iterator[None]:
        """Sets every `parameter.grad` to the mean inside the block, even if the script dropped it."""
        previous = [parameter.grad for parameter in self.parameters]
        for position, (parameter, view) in enumerate(zip(self.parameters, self.gradient_views, strict=True)):
            parameter.grad = None if position in self.absent else view
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, previous, strict=True):
                parameter.grad = gradient


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Returns what tells whether a tensor shows the same elements in the same order."""
    return tensor.data_ptr(), tensor.stride()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _views(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Returns each parameter's part of `flat`, with its own storage, since `torch.save` writes all of it."""
    ends = list(accumulate(parameter.numel() for parameter in parameters))
    return [
        from_dlpack(flat[end - parameter.numel() : end]).view(parameter.shape)
        for end, parameter in zip(ends, parameters, strict=True)
    ]
