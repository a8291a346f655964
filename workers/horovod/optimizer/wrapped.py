"""What both wrappers of an optimizer have: names, buckets, and the attributes of Horovod's wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from hubring.ps.config.environment import environment
from hubring.workers.horovod.compression import Compressor
from hubring.workers.horovod.optimizer.gradient_group import BUCKET_BYTES, Bucket, Groups, pack
from hubring.workers.horovod.optimizer.passes import Passes
from hubring.workers.horovod.optimizer.trainer import Trainer
from hubring.workers.horovod.world.process_set import ProcessSet
from hubring.workers.horovod.world.world import current

NamedParameters = Iterable[tuple[str, torch.Tensor]] | None

NEVER_CALLED = {
    "_allreduce_grad_async",
    "_grouped_allreduce_grad_async",
    "_make_hook",
    "_register_hooks",
    "_sparse_allreduce_grad_async",
}
"""Methods of Horovod's wrappers that send one gradient. Here many gradients are sent together."""


class WrappedOptimizer(Optimizer):
    """Mixin in front of the wrapped optimizer's class.

    Scripts use the underscored attributes of Horovod's wrappers, so they mean the same here.

    Attributes:
        backward_passes_per_step: Number of backward passes per step. Change it with the method.
        _parameter_names: The name of every parameter.
        _compression: Compresses what is exchanged.
    """

    backward_passes_per_step: int
    _parameter_names: dict[torch.Tensor, str]
    _compression: type[Compressor]
    _passes: Passes
    _trainer: Trainer

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        overridden = sorted(NEVER_CALLED & vars(cls).keys())
        if overridden:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(overridden)}, which Hubring never calls, because it"
                " exchanges many gradients together; pass a compressor as compression=, or exchange gradients"
                " with hvd.allreduce_async_ and step an optimizer that is not wrapped"
            )

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """The number of backward passes that each parameter still waits for; a script may change it."""
        return self._passes.left

    @staticmethod
    def find_duplicates(lst: Iterable[Any]) -> set[Any]:
        """Returns the elements that are in `lst` more than once."""
        return {one for one, count in Counter(lst).items() if count > 1}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes per step."""
        self.backward_passes_per_step = passes
        self._passes.set_per_step(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients.

        Raises:
            AssertionError: A backward pass ran since the last step or `synchronize`.
        """
        if self._passes.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def _trained(self) -> dict[torch.Tensor, str]:
        """Returns the name of every trained parameter, in the optimizer's order."""
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        return {one: self._parameter_names[one] for one in held if one.requires_grad}


def check_derived(optimizer: Optimizer, wrapper: type, name: str) -> None:
    """Checks that the optimizer's class is derived from the wrapper, which Horovod calls `name`.

    Raises:
        TypeError: The class has copies of the wrapper's methods, as in Horovod's own code.
    """
    if not isinstance(optimizer, wrapper):
        kind = type(optimizer).__name__
        raise TypeError(
            f"{kind} has copies of the methods of {name}; derive it instead:"
            f" type({kind!r}, ({name}, {kind}), {{}}), or call hvd.DistributedOptimizer"
        )


def names_of(optimizer: Optimizer, named_parameters: NamedParameters) -> dict[torch.Tensor, str]:
    """Returns the name of every parameter, from pairs of names and parameters, or numbered.

    Raises:
        ValueError: A parameter has no name, or two have the same.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        pairs = [
            (f"allreduce.noname.{index}.{place}", parameter)
            for index, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        ]
    else:
        pairs = _checked(list(named_parameters))
    names = {parameter: name for name, parameter in pairs}
    unnamed = [parameter for parameter in held if parameter not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {len(unnamed)} of the optimizer's parameters were not"
            f" named, the first of shape {tuple(unnamed[0].shape)}; pass all of model.named_parameters()"
        )
    return names


def buckets_of(names: Mapping[torch.Tensor, str], groups: Groups, process_set: ProcessSet) -> list[Bucket]:
    """Returns the buckets of the trained parameters; none if this rank never exchanges with others."""
    if current().communicator.size == 1 or not process_set.included():
        return []
    threshold = environment().get("HOROVOD_FUSION_THRESHOLD", "")
    return pack(names, groups, int(threshold) if threshold.isdecimal() else BUCKET_BYTES)


def _checked(pairs: list[Any]) -> list[tuple[str, torch.Tensor]]:
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by"
            " model.named_parameters()."
        )
    twice = ", ".join(sorted(WrappedOptimizer.find_duplicates(name for name, _ in pairs)))
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {twice}")
    return pairs
