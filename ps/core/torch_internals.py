"""What Hubring needs of torch and CPython that has no public name.

All of it holds for torch 2.13.0 and 2.14.1 and CPython 3.11. `make test TORCH=VERSION` fails on a release
where it does not. The audit and the peers of the comparison have a few names of their own.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

__all__ = ["is_functorch_tensor"]  # whether `torch.func` has wrapped a tensor, which then has no values

# The kernels behind `fused=True` of `torch.optim`: one step of many tensors in one call.
fused_sgd = torch._fused_sgd_
fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
fused_adagrad = torch._fused_adagrad_

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


def objects_of(kind: type) -> Iterator[Any]:
    """Yields this process's objects of a kind, without those that `gc.freeze` took from the collector."""
    # Not `isinstance`: it asks the object, and a proxy then loads what it stands for.
    return (one for one in gc.get_objects() if issubclass(type(one), kind))


def optimizers() -> Iterator[Optimizer]:
    """Yields this process's optimizers, without wrappers of frameworks, which have no groups of their own."""
    return (one for one in objects_of(Optimizer) if "param_groups" in vars(one))


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
    from torch._dynamo import trace_rules  # as torch's first optimizer does

    own = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("hubring.")}
    trace_rules.FORCE_SKIP_FILES |= {file for name, file in own.items() if name not in _TRACED and file}


_TRACED = {
    "hubring.ps.core.torch_internals",
    "hubring.workers.audit.samples",
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


def share_state_hooks(wrapper: Optimizer, optimizer: Optimizer) -> None:
    """Gives a wrapper the hooks on `state_dict` and `load_state_dict` of the optimizer that it wraps."""
    for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        hooks = f"_optimizer_{name}_hooks"
        setattr(wrapper, hooks, getattr(optimizer, hooks))


def unsaved_buffers(module: torch.nn.Module) -> set[str]:
    """Returns the names of the module's own buffers that its `state_dict` leaves out."""
    return module._non_persistent_buffers_set


def note_step(optimizer: Optimizer) -> None:
    """Records that an optimizer has stepped. Else its learning rate scheduler warns."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def gloo_group(store: Any, rank: int, size: int, address: Any, timeout: float) -> Any:
    """Opens a Gloo group whose member listens at `address`, which `ProcessGroupGloo.create_device` returned.

    The public constructor takes no address: Gloo then listens at that of the host name.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [address], timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout: float) -> Any:
    """Opens a NCCL group with a timeout, which connects in its first operation."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def backends_chosen(choose: Callable[[str, int | None, Sequence[int]], str]) -> Iterator[None]:
    """Lets a function choose the backend of each group of torch.distributed, however a script makes it.

    Args:
        choose: Returns the backend for the one asked for, "undefined" for none, this process's rank in the
            group, and the group's ranks, empty for the world.
    """
    makes: Any = c10d
    make = makes._new_process_group_helper  # what init_process_group, new_group and meshes call

    @wraps(make)
    def make_chosen(
        size: int, rank: int | None, ranks: Sequence[int], asked: str, *rest: Any, **more: Any
    ) -> Any:
        return make(size, rank, ranks, choose(asked, rank, ranks), *rest, **more)

    makes._new_process_group_helper = make_chosen
    try:
        yield
    finally:
        makes._new_process_group_helper = make


@cache
def keep_groups_with_models() -> None:
    """Keeps the group of each DDP model that is made from now on until the model is gone.

    After `destroy_process_group()` only a model's C++ parts may hold the group. They free it with the
    interpreter locked, and wait there for Gloo's threads (torch 2.13; not 2.14). A thread that has not yet
    dropped what it exchanged last waits for the interpreter, so neither ends. Python frees a group unlocked.
    """
    models: Any = DistributedDataParallel
    make = models._ddp_init_helper

    @wraps(make)
    def made(model: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        make(model, *arguments, **options)
        for part in (model.reducer, model.logger):
            weakref.finalize(part, lambda _: None, model.process_group).atexit = False

    models._ddp_init_helper = made


def share_storage(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what another process needs to open a CUDA tensor's storage, as `torch.multiprocessing` does."""
    _, *names = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return tuple(names)


def open_shared_storage(device: int | None, names: tuple[Any, ...]) -> torch.UntypedStorage:
    """Opens the storage that another process shared."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device, *names)
    return storage
