"""Rows `ddp` and `ddp-hub` of a script that makes its own `torch.distributed` group and its own DDP model.

The gate's recorder taps `hubring.DistributedOptimizer`. Here it taps torch's optimizers of the script's DDP
models: torch's global optimizer hooks say when they step, and DDP's buckets exchange in backward as in the
row `ddp` of a script with our lines. A metric is read from the script's output.

What is recorded is only right for parameters that DDP exchanges. So where the script steps others, or none,
`ScriptWatch.unseen` says that the gate cannot check the run.
"""

from __future__ import annotations

import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hubring.ps.core.errors import UsageError
from hubring.ps.core.torch_internals import is_traced, optimizers
from hubring.workers import api
from hubring.workers.runtime import context
from hubring.workers.runtime.worker import Worker, unwatched

ON_HUB = "ddp-hub"
"""The row in which the hub averages. In the other one, `ddp`, the script's group is as it asks."""

NOTHING_SEEN = "no optimizer of torch stepped the parameters of a DistributedDataParallel model"


class ScriptOptimizer:
    """One of torch's optimizers and the DDP models whose parameters it steps, as the recorder needs them.

    Attributes:
        wrapped: torch's optimizer.
        model: The first of its models.
        completed_steps: Completed steps.
        had_state: Whether it had taken steps before it was seen.
        nbytes: Bytes of its parameters.
    """

    ahead, exchange_seconds = 0, 0.0

    def __init__(self, wrapped: Optimizer, models: list[DistributedDataParallel]) -> None:
        self.wrapped, self.model, self._models = wrapped, models[0], models
        self.completed_steps, self.had_state = 0, bool(wrapped.state)
        self.nbytes = sum(one.nbytes for one in self.named_parameters.values())
        self.pre_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.post_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        return self.wrapped.param_groups

    @property
    def grad_scale(self) -> Tensor | None:
        """By which a fused `step()` divides gradients, while a GradScaler calls it."""
        return getattr(self.wrapped, "grad_scale", None)

    @property
    def named_parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name, without DDP's prefix."""
        own = {id(one) for group in self.param_groups for one in group["params"]}
        return {
            f"{number}.{name}" if number else name: one
            for number, model in enumerate(self._models)
            for name, one in model.module.named_parameters()
            if id(one) in own and one.requires_grad
        }

    @property
    def model_state(self) -> dict[str, Tensor]:
        """The buffers of its models by name."""
        return {name: one for model in self._models for name, one in model.module.named_buffers()}

    @property
    def hooked(self) -> bool:
        """Whether a communication hook of the script changes what is exchanged."""
        return any(model._comm_hooks for model in self._models)

    def settle(self) -> None:
        """Does nothing: `step()` leaves nothing in flight."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Adds a hook. The optimizer's own would look like hooks of the script."""
        return _added(self.pre_hooks, hook)

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Adds a hook."""
        return _added(self.post_hooks, hook)

    def register_load_state_dict_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Adds a hook."""
        return self.wrapped.register_load_state_dict_post_hook(hook)


def _added(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class ScriptWatch:
    """Finds the script's models and optimizers, and reports its steps. Make it before the script runs.

    Args:
        row: `ddp` or `ddp-hub`.
        size: Number of workers.
        samples: Samples of a step of all workers; None: those that the model gets.
        metric: Key of the metric that the script prints.
        pattern: Regular expression of which the first group is the metric; None: the script calls
            `hubring.report()`.
    """

    def __init__(self, row: str, size: int, samples: int | None, metric: str, pattern: str | None) -> None:
        self._row, self._size, self._samples, self._metric = row, size, samples, metric
        self._pattern = None if pattern is None else re.compile(pattern)
        self._models: list[DistributedDataParallel] = []
        self._known: dict[Optimizer, ScriptOptimizer] = {}
        self._searched = self._trains = self._in_step = self._off = False
        self._stepped = set[ScriptOptimizer]()
        """Optimizers that have stepped since the last report."""
        self._printed: dict[str, float] = {}
        self._strange = ""
        self._begin_slow: Callable[[int], None] = unwatched
        self._replace_constructors()
        register_optimizer_step_pre_hook(self._step_begins)
        register_optimizer_step_post_hook(self._step_ended)
        for stream in (sys.stdout, sys.stderr) if self._pattern is not None else ():
            self._read(stream)
        if row == ON_HUB:
            api.DistributedOptimizer = _no_wrapper  # type: ignore[assignment, misc]

    def close(self) -> None:
        """Watches no longer: the script calls `hubring.init()`."""
        self._off = True

    @property
    def unseen(self) -> str:
        """Why the gate cannot check what the script did; empty if it can."""
        if self._off or self._strange:
            return self._strange
        return "" if any(one.completed_steps for one in self._known.values()) else NOTHING_SEEN

    def honest(self, result: dict[str, Any]) -> dict[str, Any]:
        """Returns a worker's result with what is not seen, and null for what cannot be measured."""
        if self._row != ON_HUB or "exchange" not in result:
            return {**result, "unseen": self.unseen}
        # On one host the backend exchanges beside the hub, in shared memory.
        unknown = ("exposed_seconds", "hidden_seconds", "bytes_sent", "bytes_received")
        exchange = {**result["exchange"], **dict.fromkeys(unknown)}
        return {**result, "exchange": exchange, "unseen": self.unseen}

    def _replace_constructors(self) -> None:
        start: Any = dist.init_process_group
        make: Any = DistributedDataParallel.__init__

        @wraps(start)
        def started(*arguments: Any, **options: Any) -> None:
            start(*arguments, **options)
            self._join()

        @wraps(make)
        def made(model: DistributedDataParallel, module: torch.nn.Module, *rest: Any, **options: Any) -> None:
            worker = self._join()
            if worker is None:
                make(model, module, *rest, **options)
                return
            if not self._models:  # its hooks must run before DDP's
                self._begin_slow = worker.watch([one for one in module.parameters() if one.requires_grad])
                self._begin_slow(0)
            make(model, module, *rest, **options)
            self._models.append(model)
            self._searched = False
            # A function, as a copy of the model takes no copy of what its hooks belong to.
            model.register_forward_pre_hook(lambda model, _: self._forward_begins(model))

        dist.init_process_group = started
        DistributedDataParallel.__init__ = made  # type: ignore[method-assign,assignment]

    def _join(self) -> Worker | None:
        """Returns the worker, which begins with the script's group; None without one."""
        if self._off or not dist.is_initialized():
            return None
        if self._row != ON_HUB:
            context.init()
        elif context.started() is None:
            raise UsageError(
                f"row {ON_HUB} needs a group on Gloo, or one for which the script names no backend, and this"
                f" script asks for {dist.get_backend()}; run it with --backend gloo, or remove the row"
            )
        return context.current()

    # What the script does, in order.

    def _forward_begins(self, model: Any) -> None:
        if is_traced() or not torch.is_grad_enabled():
            return
        training = model.module.training  # else it evaluates, unless it never trains in another way
        self._trains = self._trains or training
        self._in_step = training or not self._trains
        if not self._searched:  # it makes its optimizers before or after its models
            self._searched = True
            for found in optimizers():
                self._adopt(found)

    def _adopt(self, optimizer: Optimizer) -> ScriptOptimizer | None:
        if optimizer in self._known:
            return self._known[optimizer]
        every = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        trained = set(map(id, every))
        models = [model for model in self._models if trained & _exchanged(model)]
        if not models or trained.difference(*map(_exchanged, models)):
            return None
        self._known[optimizer] = one = ScriptOptimizer(optimizer, models)
        context.current().adopt(one)
        return one

    def _step_begins(self, optimizer: Optimizer, *given: Any) -> None:
        if self._off or context.started() is None:
            return
        one = self._adopt(optimizer)
        if one is None:
            name = type(optimizer).__name__
            self._strange = f"its {name} steps parameters that DistributedDataParallel does not exchange"
            return
        for hook in list(one.pre_hooks.values()):
            hook(optimizer, *given)

    def _step_ended(self, optimizer: Optimizer, *given: Any) -> None:
        one, worker = self._known.get(optimizer), context.started()
        if self._off or one is None or worker is None:
            return
        if not getattr(optimizer, "found_inf", None):  # else a fused step of a GradScaler did nothing
            self._in_step = False
            one.completed_steps += 1
            if count := getattr(worker.communicator, "count_passes", None):
                count(2, one.nbytes)
            worker.step_completed(one.completed_steps)
            if one is worker.trainers[0] or one in self._stepped:  # others train on the same samples
                self._stepped.clear()
                if self._pattern is not None or self._samples is not None:
                    self._report(worker)
            self._stepped.add(one)
            self._begin_slow(one.completed_steps)
        for hook in list(one.post_hooks.values()):
            hook(optimizer, *given)

    def _report(self, worker: Worker) -> None:
        rank, seen = worker.communicator.rank, 0 if worker.audit is None else worker.audit.samples
        own = seen if self._samples is None else (self._samples + rank) // self._size
        if own < 1:
            raise UsageError(
                f"the samples of step {worker.completed_steps} cannot be counted: call the model that"
                " DistributedDataParallel returns, or pass --samples-per-step N, the samples of all workers"
            )
        printed, self._printed = self._printed, {}
        worker.report({"samples": own, **printed})

    def _read(self, stream: Any) -> None:
        """Looks for the metric in each line that this process writes to a stream."""
        write, begun = stream.write, ""

        def noting(text: str) -> Any:
            nonlocal begun
            *lines, begun = re.split(r"[\r\n]", begun + text)
            for line in lines:
                self._note(line)
            return write(text)

        stream.write = noting

    def _note(self, line: str) -> None:
        worker = context.started()
        assert self._pattern is not None
        if worker is None or self._off or os.getpid() != worker.pid:
            return
        try:
            value = float(self._pattern.search(line)[1])  # type: ignore[index]
        except (TypeError, ValueError):  # another line, such as the script's source in a traceback
            return
        if self._in_step:  # a line of its own would be taken for the end of a step
            self._printed = {self._metric: value}
        else:
            worker.report({self._metric: value})


def _exchanged(model: DistributedDataParallel) -> set[int]:
    """Returns the parameters that a model exchanges, by identity."""
    left_out = model.parameters_to_ignore
    return {id(one) for name, one in model.module.named_parameters() if name not in left_out}


def _no_wrapper(*_: Any, **__: Any) -> Any:
    raise UsageError(
        f"row {ON_HUB} trains scripts with DistributedDataParallel; for hubring.DistributedOptimizer, use the"
        " row hub-aggregate"
    )
