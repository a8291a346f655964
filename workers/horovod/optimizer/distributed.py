"""DistributedOptimizer: wraps the script's optimizer, and reduces gradients over all ranks.

This package's allreduces reduce the gradients while backward still runs, and the script's optimizer takes the
step. With a hub too, the hub only reduces.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hubring.ps.config.environment import environment
from hubring.workers.horovod.collectives.reduction import Reduction
from hubring.workers.horovod.optimizer.adasum import DeltaOptimizer
from hubring.workers.horovod.optimizer.compression import Compression, Compressor
from hubring.workers.horovod.optimizer.gradient_group import BUCKET_BYTES, Bucket, Groups, check_groups, pack
from hubring.workers.horovod.optimizer.gradients import GradientExchange
from hubring.workers.horovod.optimizer.trainer import Trainer
from hubring.workers.horovod.reduce_ops import Adasum, Average, chosen
from hubring.workers.horovod.world.process_set import ProcessSet, global_process_set
from hubring.workers.horovod.world.world import current

if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object  # a mixin in front of an optimizer's class


class AveragingOptimizer(_Base):
    """Mixin in front of the wrapped optimizer's class."""

    backward_passes_per_step: int
    _exchange: GradientExchange
    _trainer: Trainer
    _synchronized: bool
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Waits until every `.grad` is reduced. Call this before you clip gradients, for example.

        Raises:
            HorovodInternalError: Ranks disagree, or a rank is lost.
        """
        self._exchange.settle()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step` does not synchronize. Use it after a call of `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes per step."""
        self.backward_passes_per_step = passes
        self._exchange.passes.set_per_step(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the gradients, then takes the wrapped optimizer's step.

        Args:
            closure: Recomputes loss and gradients. The optimizer can call it several times; the gradients are
                reduced each time.

        Returns:
            The result of the closure.

        Raises:
            HorovodInternalError: Ranks disagree, or a rank is lost.
            Preempted: The job stops at this step.
        """
        if closure is None:
            self._synchronize_gradients()
            loss = super().step()
        else:
            loss = super().step(lambda: self._after_backward(closure))
        self._synchronized = False
        self._trainer.step_completed()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the wrapped step runs torch's hooks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients.

        Raises:
            AssertionError: Gradients are being exchanged.
        """
        if self._exchange.passes.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state, and starts a new step."""
        self._exchange.passes.reset()
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)

    def _after_backward(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._synchronize_gradients()
        self._synchronized = False  # each call of the closure, for example by LBFGS, has new gradients
        return loss

    def _synchronize_gradients(self) -> None:
        if not self._should_synchronize:
            return
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after"
                " optimizer.synchronize(). This can cause training slowdown.",
                stacklevel=3,
            )
        self.synchronize()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that its gradients are reduced over all ranks.

    Args:
        optimizer: The optimizer to wrap; the result shares its groups and state.
        named_parameters: Names of all parameters, which match the exchanges across ranks.
        compression: Compresses gradients for the exchange.
        backward_passes_per_step: Number of backward passes whose gradients one step sums.
        op: `hvd.Average`, `hvd.Sum`, or `hvd.Adasum`, which reduces the changes of local steps.
        gradient_predivide_factor: Divides gradients before the sum; the average does not change.
        num_groups: The older form of `groups`.
        groups: Number of exchanges per step, or lists of the parameters of each exchange; None: exchanges of
            HOROVOD_FUSION_THRESHOLD bytes, by default 4 MiB.
        sparse_as_dense: Whether to send sparse gradients as dense tensors.
        process_set: The ranks that take part; other ranks step alone.

    Returns:
        An instance of a class that is derived from the optimizer's class and has its name.

    Raises:
        ValueError: Names are missing, duplicate or invalid; or another argument is invalid.
        NotImplementedError: Adasum of a process set, or of a number of ranks that is not a power of 2.
    """
    how = _reduction(op, gradient_predivide_factor, process_set)
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; expected at least 1")
    names = _names(optimizer, named_parameters)
    buckets = _buckets(names, check_groups(groups), process_set)
    adasum = how.op == Adasum and current().size > 1
    made = _derived(optimizer, DeltaOptimizer if adasum else AveragingOptimizer)
    waited = made.waited if adasum else lambda: made._exchange.seconds
    # Before the exchange, so that the delays of a slowed worker run before the exchange's gradient hooks.
    made._trainer = Trainer({name: parameter for parameter, name in names.items()}, waited)
    made.backward_passes_per_step, made.op, made.process_set = backward_passes_per_step, op, process_set
    made.gradient_predivide_factor, made.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    if adasum:
        made.prepare(buckets, backward_passes_per_step, compression)
    else:
        made._exchange = GradientExchange(
            names, buckets, backward_passes_per_step, how, compression, sparse_as_dense, process_set
        )
        made._synchronized, made._should_synchronize = False, True
    made._trainer.begin()
    return made


def _reduction(op: int, predivide: float, process_set: ProcessSet) -> Reduction:
    chosen(op, None)
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    how = Reduction(op, 1.0 / predivide, predivide)
    how.check(process_set)
    return how


def _names(optimizer: Optimizer, named_parameters: Any) -> dict[torch.Tensor, str]:
    """Returns the name of every trained parameter, in the optimizer's order."""
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
    return {parameter: names[parameter] for parameter in held if parameter.requires_grad}


def _checked(pairs: list[Any]) -> list[tuple[str, torch.Tensor]]:
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by"
            " model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    return pairs


def _buckets(names: dict[torch.Tensor, str], groups: Groups, process_set: ProcessSet) -> list[Bucket]:
    """Returns the buckets; none if this rank never exchanges with others."""
    if current().communicator.size == 1 or not process_set.included():
        return []
    threshold = environment().get("HOROVOD_FUSION_THRESHOLD", "")
    return pack(names, groups, int(threshold) if threshold.isdecimal() else BUCKET_BYTES)


def _derived(optimizer: Optimizer, front: type) -> Any:
    """Returns the same optimizer as an instance of its class with `front` as a mixin."""
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (front, kind), {"__module__": kind.__module__}))
    # A scheduler sets a wrapper of the old `step` on the optimizer. The new optimizer must not have it.
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return made
