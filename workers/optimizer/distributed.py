"""The optimizer that a training script uses in place of its own.

    steps_on     gradients are exchanged         who steps              .grad after backward
    worker       during backward                 the wrapped optimizer  the mean over all ranks
    server       during backward, or in step()   the hub                this rank's own

On a hub the first step is watched: a script that unscales, clips or otherwise
changes gradients after backward has them exchanged in `step()`, any other
during backward.

With `cross_barrier`, from the second step on, `step()` leaves the exchange under
way: every module's forward waits for its own parameters (`hubring.workers.optimizer.forward`), and
where workers step, that is when their part of the step is taken. A step counts
as completed when its gradients are handed over: nothing can take it back then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Hyper
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.buckets.bucketing import Bucket, make_buckets
from hubring.workers.buckets.layout import NamedParameters
from hubring.workers.collectives import allreduce
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer import scaling
from hubring.workers.optimizer.backward import BackwardPasses
from hubring.workers.optimizer.bucket_steps import Stepper
from hubring.workers.optimizer.checkpoints import Checkpoints
from hubring.workers.optimizer.exchange import Exchange
from hubring.workers.optimizer.forward import ForwardGuard
from hubring.workers.optimizer.gradient_changes import ChangeWatch
from hubring.workers.optimizer.model_tensors import ModelTensors, check_model
from hubring.workers.optimizer.overlap import Overlap
from hubring.workers.optimizer.setup import Setup, bytes_of_bucket, ignore
from hubring.workers.optimizer.tuning import Tuner
from hubring.workers.optimizer.uneven import UnevenInputs
from hubring.workers.optimizer.wrapping import OptimizerWrapper, asks_for_loss

log = logging.getLogger(__name__)


class DistributedOptimizer(OptimizerWrapper):
    """Makes `optimizer` one of all ranks: exchanges gradients, then steps here or on the hub.

    It is an optimizer as any other: schedulers, hooks, `GradScaler`, closures and
    `state_dict` work on it. `param_groups`, `state` and `defaults` are those of
    the wrapped optimizer; where the hub steps, the state is the hub's, and
    `state_dict` holds the groups alone. A parameter without a gradient counts as
    one with a gradient of zeros. With a `GradScaler`, a step that one rank must
    skip is skipped by all; on a hub every rank keeps a loss scale of its own.

    Ranks count alike, so a rank whose batch has another size than the others'
    weighs its mean loss by `its samples * size / all samples`. Buffers come from
    rank 0 once, here; from then on BatchNorm normalises by each rank's own batch,
    as under DDP without SyncBatchNorm, and each rank keeps running statistics of its own.
    """

    # GradScaler then leaves unscaling and skipping to step(), which knows of the other ranks.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module | None = None,
        *,
        named_parameters: NamedParameters | None = None,
        backward_passes_per_step: int = 1,
        bucket_bytes: int | None = None,
        communicator: Communicator | None = None,
        after_step: Callable[[int], None] | None = None,
        overlap: bool = True,
        cross_barrier: bool = False,
        uneven: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Lays parameters and gradients out flat and brings rank 0's values to all ranks.

        By now the model must be on its device, of its dtype, and loaded if it is to be: from
        here on every `parameter.data` and `.grad` is a view of a bucket.

        Args:
            optimizer: Over the parameters to train.
            model: Names the parameters; its buffers and frozen parameters come from rank 0 as well.
            named_parameters: Names the parameters where there is no one model.
            backward_passes_per_step: How many backward passes one step sums up before the exchange.
            bucket_bytes: Where a bucket is full; None takes the worker's setting. If that is None too,
                the first steps try how many bytes are best handed over together
                (`hubring.workers.optimizer.tuning`).
            communicator: None takes that of `hubring.init()`.
            after_step: Called with `completed_steps` after each step; None takes `hubring.init()`'s.
            overlap: False never exchanges during backward: for scripts that begin to change gradients
                after the first step, or whose backward reads a detached view of a parameter. Where a hub
                steps a model on the CPU there is then one bucket a group and dtype, and no size to try,
                unless `bucket_bytes` is given or `cross_barrier`.
            cross_barrier: Lets `step()` return before the parameters are back. For scripts that read
                parameters through modules' forwards and `state_dict` alone, or call `synchronize()`
                before they read them otherwise (`copy.deepcopy`, averages of weights, `torch.compile`,
                a penalty on weights computed before the model's forward): what is read too early is
                the last step's, and not always found out. Nor may such scripts touch `.grad` between
                `step()` and the next forward, but by `optimizer.zero_grad()`.
            uneven: Ranks may have differently many batches: each calls `join()` after its last step. Costs
                one small collective a step, in which all are asked who still trains.
            timeout: Seconds that one step's exchange may take; None takes the communicator's.

        Raises:
            ConfigError: The model is something else, or does not fit the optimizer, or ranks differ; names
                the first difference. Or `cross_barrier` has no model to watch, or an optimizer that steps
                only as a whole; or `uneven` is asked for beside what it cannot go with.
        """
        check_model(model)
        setup = Setup.of(communicator, bucket_bytes, after_step)
        super().__init__(optimizer)
        self._communicator = communicator = setup.communicator
        self._after_step = setup.after_step
        self._steps_on_server = communicator.steps_on == "server"
        if cross_barrier and model is None:
            raise ConfigError("cross_barrier=True needs the model: its modules' forwards are what waits")
        self._asks = asks_for_loss(optimizer)
        if uneven and (cross_barrier or self._asks or not communicator.lockstep):
            raise ConfigError(
                "uneven=True is for ranks that keep step, with one exchange a step that it waits for: it goes"
                " neither with cross_barrier=True nor with LBFGS, and an asynchronous hub does not need it"
            )
        self._uneven_inputs = UnevenInputs(communicator, optimizer) if uneven else None
        self._stepper = None if self._steps_on_server or not cross_barrier else Stepper(optimizer)
        named = named_parameters if model is None else model.named_parameters()
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        at_once = self._steps_on_server and not overlap and not cross_barrier
        self._buckets = self._lay_out(named, setup.bucket_bytes or bytes_of_bucket(held, at_once=at_once))
        self._tensors = ModelTensors(model, self._buckets, held)
        self._timeout = communicator.timeout if timeout is None else timeout
        self.ahead = int(cross_barrier)
        self._steps = self._start_from_rank_0(setup.checkpoints)
        self._exchange = Exchange(communicator, self._buckets, self._hyper, self._timeout, setup.recorder)
        self._watch = ChangeWatch(self._buckets, self._hyper)
        self._begin_slow = setup.watch(self._tensors.exchanged)  # its hooks stand before those that hand over
        guard = self._watch_forward(model) if cross_barrier and model is not None else None
        self._overlap = Overlap(communicator, self._exchange, self._watch, guard, wanted=overlap)
        self._passes = BackwardPasses(
            self._buckets,
            backward_passes_per_step,
            self._watch,
            self._exchange,
            self._overlap.bucket_ready,
            self._overlap.backward_ended,
        )
        self._tuner = None if setup.bucket_bytes else Tuner(communicator, self._exchange, self._timeout)
        setup.adopt(self)
        self._begin_slow(self._steps)
        self._asked = not self._steps

    @property
    def completed_steps(self) -> int:
        """Steps that changed the parameters, those before a restart included: where the script goes on."""
        self._asked = True
        return self._steps

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Every trained parameter by name."""
        return self._tensors.trained()

    @property
    def model_state(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds of the model by name: parameters, buffers, frozen parameters."""
        return self._tensors.state()

    @property
    def exchange_seconds(self) -> float:
        """Time that exchanges took from training: handing over, and waiting for what nothing hid."""
        return self._exchange.seconds

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step on all ranks; afterwards the parameters are the ones to use next.

        With `cross_barrier` they are when a module's forward, `state_dict` or `synchronize()` reads them.

        Args:
            closure: Computes the loss anew, gradients and all; called once, before the exchange. An
                optimizer that cannot do without, as LBFGS, calls it as often as it likes, each time with
                an exchange; all ranks must then be given one, and ask it equally often.

        Returns:
            What the closure returned; where it was LBFGS that asked, the mean of the ranks' losses.

        Raises:
            ConfigError: The script changed gradients that were handed over already.
            DeadlineExceeded: The exchange took longer than the timeout.
            HubringError: What the exchange failed with; with `cross_barrier` whoever waits next is told.
            Preempted: The job stops at this step.
        """
        loss = None
        if closure is not None and self._asks:
            loss = self.wrapped.step(lambda: self._evaluate(closure))
            self._end_step()
            return loss
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._tensors.check_frozen()
        self._overlap.settle(self._passes.count, scales=hasattr(self, "found_inf"))
        if self._uneven_inputs is not None:
            self._anybody(self._uneven_inputs, trains=True)
        if self._must_skip():
            self._begin_step()
            if self._tuner is not None:
                self._tuner.note_skip()
        else:
            self._take_step()
            self._end_step()
        return loss

    def join(self) -> None:
        """Says that this rank has no batch left, and takes the others' steps until none of them has.

        In these its gradient is zeros and counts in the mean, and numbers in its groups, such as the
        learning rate, are the others'. So all ranks end with the same parameters and `completed_steps`.

        Raises:
            ConfigError: `uneven=True` was not given, so the others do not ask.
            HubringError: What `step()` raises.
        """
        if self._uneven_inputs is None:
            raise ConfigError("join() needs DistributedOptimizer(..., uneven=True), on all ranks")
        while True:
            self.zero_grad()
            if not self._anybody(self._uneven_inputs, trains=False):
                self._begin_step()
                return
            self._take_step()
            self._end_step()

    def synchronize(self) -> None:
        """Waits until all parameters are the ones to use next; without `cross_barrier` they are already.

        Raises:
            DeadlineExceeded: The exchange took longer than the timeout.
            HubringError: What the exchange failed with.
        """
        self._exchange.settle_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes all gradients in place, whatever `set_to_none`: they must stay where they are.

        Raises:
            ConfigError: They were handed over already; a push cannot be taken back.
        """
        if self._overlap.handed_over:
            raise ConfigError(
                "zero_grad() came after the gradients were pushed during backward: call step() first, "
                f"or pass {self._overlap.fix} to DistributedOptimizer if the script skips steps"
            )
        if self._passes.count:
            self._watch.note_dropped()
        self._begin_step()
        for bucket in self._buckets:
            self._exchange.zero_gradients(bucket)

    def refresh(self) -> None:
        """Brings the newest parameters of an asynchronous hub; elsewhere they are here already."""
        self._exchange.refresh()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer; where the hub steps, the groups alone count."""
        if self._steps_on_server and state_dict.get("state"):
            log.warning("the hub holds the optimizer's state: only the parameter groups were loaded")
        super().load_state_dict(state_dict)

    def _lay_out(self, named_parameters: NamedParameters | None, bucket_bytes: int) -> list[Bucket]:
        name = self._name_on_server() if self._steps_on_server else ""
        here = self._communicator
        return make_buckets(
            self.wrapped,
            named_parameters,
            here.allocate,
            bucket_bytes,
            name,
            here.allocate_values,
            adjacent=here.joins,
        )

    def _name_on_server(self) -> str:
        """What the hub is to run; refused here, not in the first backward, if it cannot."""
        kind: type[Optimizer] = type(self.wrapped)
        name: str = kind.__name__
        for group in self.param_groups:
            hyper_of(group, name)
        if getattr(torch.optim, name) is not kind:
            raise ConfigError(
                f"the hub runs torch.optim.{name}, which {kind.__module__}.{name} is not:"
                " start the workers with --aggregate, where the hub averages and your own optimizer steps"
            )
        return name

    def _start_from_rank_0(self, checkpoints: Checkpoints | None) -> int:
        """Brings everybody to one beginning; returns the completed steps to go on from."""
        if checkpoints is not None:
            checkpoints.adopt(self)
        with self._communicator.waiting:
            start = self._communicator.attach(self._buckets)
        if not self._communicator.late:
            rest = [tensor.data for _, tensor in self._tensors.rest()]
            broadcast_into(rest, self._communicator, "model.rest", self._timeout)
        return start.step if checkpoints is None else checkpoints.share(self)

    def _hyper(self, bucket: Bucket) -> Hyper:
        if not self._steps_on_server:
            return {}
        return hyper_of(self.param_groups[bucket.spec.group], bucket.spec.optimizer)

    def _watch_forward(self, model: torch.nn.Module) -> ForwardGuard:
        self.wrapped.register_state_dict_pre_hook(lambda _: self.synchronize())
        self.wrapped.register_load_state_dict_pre_hook(lambda *_: self.synchronize())
        return ForwardGuard(model, self._buckets, self._exchange)

    def _anybody(self, inputs: UnevenInputs, *, trains: bool) -> bool:
        """Asks where whoever has joined stands too: before a hub steps, and after a worker has the mean."""
        if hasattr(self, "found_inf"):
            raise ConfigError("uneven=True does not go with a GradScaler: who has joined has none to ask")
        if not self._steps_on_server:
            self._exchange.finish()
        return inputs.anybody(trains=trains)

    def _must_skip(self) -> bool:
        """Deals with a GradScaler: True if some rank's gradients overflowed, else unscales."""
        if not hasattr(self, "found_inf"):
            return False
        if not self._steps_on_server and not self._exchange.complete:
            raise ConfigError(
                f"step() came after {self._passes.count} backward pass(es), fewer than "
                "backward_passes_per_step; with a GradScaler every step needs them all"
            )
        if scaling.overflowed(self.found_inf, self._communicator, self._timeout):
            return True
        scaling.unscale(self._buckets, getattr(self, "grad_scale", None))
        return False

    def _take_step(self) -> None:
        if self._overlap.crossing:
            self._exchange.leave(self._stepper.prepare() if self._stepper else ignore)
            if self._communicator.drains:
                # Its answer says whether the job stops here: all ranks must know now. It left first.
                self._exchange.settle(self._buckets[0])
        else:
            self._exchange.finish()
            if not self._steps_on_server:
                self.wrapped.step()
        # A scheduler made on the wrapped optimizer wants to know that a step was taken.
        self.wrapped._opt_called = True  # type: ignore[attr-defined]
        self._overlap.step_taken(self._passes.count)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """The mean gradient for an optimizer that asks for it, and the mean loss, by which it decides."""
        self._begin_step()
        with torch.enable_grad():
            loss = closure()
        self._tensors.check_frozen()
        self._exchange.finish()
        mean = allreduce(torch.as_tensor(loss), name="closure.loss", communicator=self._communicator)
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    def _end_step(self) -> None:
        self._begin_step()
        # Where all is handed over in step(), how much at a time makes no difference.
        if self._tuner is not None and self._overlap.backward:
            self._tuner.note_step()
        self._steps += 1
        if not self._asked:
            self._asked = True
            log.warning(
                "this is step %d of a job that goes on, and the script has not asked for"
                " optimizer.completed_steps: does it begin anew?",
                self._steps,
            )
        try:
            self._after_step(self._steps)
        except BaseException:
            self.synchronize()  # whoever leaves now leaves a whole step behind
            raise
        self._begin_slow(self._steps)

    def _begin_step(self) -> None:
        self._exchange.reset()
        self._passes.reset()
        self._watch.reset()
