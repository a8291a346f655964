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
from hubring.ps.core.torch_internals import reals, storage_users
from hubring.ps.core.types import BucketSpec
from hubring.workers.buckets.gradient_memory import GradientMemory, check_unconverted
from hubring.workers.buckets.staging import Staging
from hubring.workers.buckets.value_memory import Look, OwnValues, ValueMemory, nothing

PARITIES = 2
"""Numbers at the end of `Bucket.presence`."""


class Bucket:
    """Parameters of one dtype and device that are exchanged together.

    Attributes:
        spec: Names, shapes and dtype, which all ranks and the hub agree on. Complex parameters are in it as
            real ones, with a last dimension of 2.
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
        weight: What this rank's gradients count in the mean; None: 1.
        shown: Shows `gradients` as every `parameter.grad`.
        stage: Moves the bucket between the parameters' device and host memory; None on the CPU.
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
        self.weight: float | None = None
        self._moved: dict[int, torch.Tensor] = {}
        """Parameters whose memory is the script's, by position: what the script has seen of them last."""
        self._looks = 0
        self.staging = staging
        self._hold(values)
        self._set(memory)

    def use(self, memory: torch.Tensor) -> None:
        """Exchanges gradients in this memory from now on; see `__init__`. Current gradients move there."""
        earlier = self.shown
        self._set(memory)
        self.shown.replace(earlier)

    def _hold(self, values: ValueMemory) -> None:
        self._values = values
        self.values, self.landing = values.seen, values.landing
        parameters = self.parameters if values.seen.numel() else ()
        self._value_views = _views(self.values, parameters)
        self._landing_views = _views(self.landing, parameters)
        self._addresses = list(map(torch.Tensor.data_ptr, self._value_views))
        self._strides = list(map(torch.Tensor.stride, self._value_views))
        self._ends = list(accumulate(view.nbytes for view in self._value_views))

    def _set(self, memory: torch.Tensor) -> None:
        numel = self.spec.numel
        self.memory = memory
        self.gradients = memory[:numel]
        self.presence = memory[numel:] if memory.numel() > numel else None
        self._all_present = [] if self.presence is None else _presences(self.presence)
        self.shown = GradientMemory(self.gradients, self.parameters)
        self.stage = self.staging.stage(self.gradients, self.landing)

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
            shown = storage_users(parameter) - 1 > users[_storage(parameter)]
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
        if self.stage is not None:
            self.stage.give_up_values()

    def _written_elsewhere(self) -> list[int]:
        """Returns the positions of the parameters that changed because the script gave them other memory.

        They stay in that memory, `parameter.data = ...`, since other tensors of the script may show it. Their
        part of `values` stays too, since the script may have kept it, to put it back.

        Raises:
            ConfigError: A parameter has another shape, dtype or device, or the whole bucket has other memory.
        """
        addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        strides = list(map(torch.Tensor.stride, self.parameters))
        if addresses == self._addresses and strides == self._strides:
            self._moved.clear()
            return []
        changed = []
        for position, (parameter, view) in enumerate(zip(self.parameters, self._value_views, strict=True)):
            address, name = self._addresses[position], self.spec.tensors[position].name
            same_memory = addresses[position] == address
            if same_memory and strides[position] == self._strides[position]:
                self._moved.pop(position, None)
                continue
            if same_memory:  # other strides over the same memory: a transposed matrix
                parameter.data = parameter.data.clone()
            if view.data_ptr() != address:
                raise ConfigError(
                    f"parameter {name} was moved into shared memory after DistributedOptimizer was"
                    " made, where the hub's answers do not arrive: call model.share_memory() before you make"
                    " DistributedOptimizer, or share a copy, copy.deepcopy(model).share_memory()"
                )
            check_unconverted(f"parameter {name}", parameter, view)
            if position not in self._moved:
                self._moved[position] = torch.empty_like(parameter.data).copy_(view)
            # Compared with what it was, since an answer that has landed already shows in the view.
            if not torch.equal(parameter.data, self._moved[position]):
                changed.append(position)
        return changed

    def written(self) -> list[int]:
        """Returns the positions in `parameters` of those that the script changed since the last answer.

        Any write counts that changed a byte of `values`: through `.data`, NumPy, a kept view or native code.
        Empty where workers step, because nothing overwrites changes there. Ask before the bucket is sent.
        On the CPU, neighbors of a changed parameter count too after the next answer has landed.

        It takes microseconds where nothing changed. On a GPU it waits for the device.
        """
        if not self._addresses:
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
        if not self._addresses:
            return nothing
        if self._written_elsewhere():
            return lambda: True
        return self._values.look()

    def arrive(self) -> None:
        """Makes the last answer visible to work queued from now on. Call it once the exchange's work is done.

        The script's changes of these parameters are dropped: `values` is what landed last. So are parameters
        to which the script has given memory of their own.
        """
        if self.stage is not None:
            self.stage.arrive()
        self._values.forget()
        for position, seen in self._moved.items():
            seen.copy_(self._value_views[position])
            self.parameters[position].data.copy_(seen)

    @property
    def host_gradients(self) -> torch.Tensor:
        """The gradients in host memory: `gradients` itself on the CPU."""
        return self.gradients if self.stage is None else self.stage.gradients

    @property
    def host_values(self) -> torch.Tensor:
        """The host memory in which new values land: `landing` itself on the CPU."""
        return self.landing if self.stage is None else self.stage.values

    # Gradients.

    def seal(self, left_out: frozenset[int] = frozenset(), steps: int = 0) -> None:
        """Prepares the bucket to be sent: collects all gradients and notes which are absent.

        Args:
            left_out: Positions of parameters that are not to be stepped, whatever their gradient.
            steps: Completed steps.
        """
        missing = () if self.shown.collect() else self.shown.missing()
        for position in missing:
            self.shown.clear(position)
        self.absent = left_out.union(missing)
        if self.presence is not None:
            self.presence.copy_(self._all_present[steps % PARITIES])
            for position in missing:
                self.presence[position] = 0

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
        self.shown.show(self.absent)

    @contextmanager
    def lent_gradients(self) -> Iterator[None]:
        """Sets every `parameter.grad` to the mean inside the block, even if the script dropped it."""
        previous = [parameter.grad for parameter in self.parameters]
        for position, (parameter, view) in enumerate(zip(self.parameters, self.shown.views, strict=True)):
            parameter.grad = None if position in self.absent else view
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, previous, strict=True):
                parameter.grad = gradient


def _presences(presence: torch.Tensor) -> list[torch.Tensor]:
    """Returns `Bucket.presence` in an even and in an odd step, if no gradient is missing."""
    both = [torch.ones_like(presence) for _ in range(PARITIES)]
    for parity, one in enumerate(both):
        one[-1 - parity] = 0  # at the end: even, odd
    return both


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _views(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Returns each parameter's part of `flat`, with its own storage, since `torch.save` writes all of it."""
    ends = list(accumulate(map(reals, parameters)))
    return [
        from_dlpack(flat[end - reals(parameter) : end]).view(parameter.dtype).view(parameter.shape)
        for end, parameter in zip(ends, parameters, strict=True)
    ]
