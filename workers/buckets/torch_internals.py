"""What the exchange needs of torch and CPython that has no public name.

All of it holds for torch 2.13 and CPython 3.11. `tests/workers/buckets/test_torch_internals.py` fails on
versions where it does not.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_tensor
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

__all__ = ["is_functorch_tensor"]  # whether `torch.func` has wrapped a tensor, which then has no values

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs in this thread; -1 outside of one."""

version: Callable[[Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was changed in place. Views share the count, `.data` and `detach()` too."""

references: Callable[[object], int] = sys.getrefcount
"""Returns how many references an object has. CPython counts them, and so tells who kept a gradient."""

copy_each: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copies tensors to the tensors before them, in one call. The name in `torch.optim`'s own kernels."""


users_at: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns how many tensors and storage objects share the storage at this `storage_address`."""

storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns where torch keeps a storage, which has to be in use."""


def no_dense_tensor(tensor: Tensor) -> str:
    """Returns what a tensor is if its values are not dense memory of its own; otherwise an empty string."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # it wraps others, as DTensor does
        return f"a {type(tensor).__name__}"
    if is_lazy(tensor):
        return "uninitialised"
    if tensor.is_meta:
        return "on the meta device"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    return "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def reals(tensor: Tensor) -> int:
    """Returns of how many real numbers a tensor is: a complex one is exchanged as its real view."""
    return tensor.numel() * (1 + tensor.is_complex())


def storage_users(tensor: Tensor) -> int:
    """Returns how many tensors share a tensor's storage. The storage object that asks counts as one."""
    storage = tensor.untyped_storage()
    return users_at(storage_address(storage))


def when_backward_ends(call: Callable[[], None]) -> None:
    """Calls a function before the backward that runs now returns. DDP and FSDP queue theirs here too."""
    Variable._execution_engine.queue_callback(call)


def is_outermost_backward() -> bool:
    """Whether a thread of the script called the backward that runs now, and not another backward.

    False on a GPU: its backwards share a thread, which does not have the script's frames.
    """
    frame, backwards = sys._getframe(), 0
    while frame.f_back is not None:
        backwards += frame.f_code is _run_backward
        frame = frame.f_back
    return backwards == 1 and not str(frame.f_globals.get("__name__")).startswith("torch.")


_run_backward = torch.autograd.graph._engine_run_backward.__code__


def is_last_gradient_hook(parameter: Tensor, number: int) -> bool:
    """Whether no hook was registered on a parameter's accumulated gradient after the one with this number."""
    last: int = next(reversed(parameter._post_accumulate_grad_hooks))
    return last == number


def is_traced() -> bool:
    """Whether a compiler or a tracer runs the forward, so that tensors may have no values."""
    return torch.compiler.is_compiling() or bool(torch._C._is_tracing())


@cache
def keep_compiler_out() -> None:
    """Makes `torch.compile` run Hubring's own code as it is, also what backward and optimizers call.

    A compiler that runs the exchange sees gradients without values. Its graph may only have the hooks of
    modules, which see `is_traced`.
    """
    from torch._dynamo import trace_rules  # the first optimizer has imported it

    own = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("hubring.")}
    trace_rules.FORCE_SKIP_FILES |= {file for name, file in own.items() if name not in _TRACED and file}


_TRACED = {
    "hubring.workers.buckets.torch_internals",
    "hubring.workers.optimizer.model_checks",
    "hubring.workers.optimizer.rank_checks",
    "hubring.workers.reducer.forward",
}
"""The modules with hooks of a model's modules."""


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run before or after an optimizer's `step`."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def runs_before_step(optimizer: Optimizer) -> bool:
    """Whether the script has code that runs before an optimizer's step: a hook, or a `step` of its own."""
    step = vars(optimizer).get("step")
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")  # by a learning rate scheduler
    return replaced or bool(optimizer._optimizer_step_pre_hooks)


def drop_step_hooks(optimizer: Optimizer) -> None:
    """Gives an optimizer, which may share them with another one, hooks of its own on `step`: none."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Takes an optimizer its hooks on `step`, in place: torch may be about to call them."""
    hooks: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    kept = list(map(dict, hooks))
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, had in zip(hooks, kept, strict=True):
            one.update(had)


def run_first_after_step(optimizer: Optimizer, number: int) -> None:
    """Makes the hook with this number run before all others after an optimizer's step."""
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict, though typed as a dict
    hooks.move_to_end(number, last=False)


def note_step(optimizer: Optimizer) -> None:
    """Records that an optimizer has stepped. Else its learning rate scheduler warns."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
