"""`DistributedOptimizer`, which wraps a training script's optimizer.

    steps_on     gradients are exchanged         what steps             .grad after backward
    worker       during backward                 the wrapped optimizer  the mean over all ranks
    server       during backward, or in step()   the hub                this rank's own gradient

On a hub, the first step decides when gradients are exchanged. If the script unscales,
clips or otherwise changes gradients after backward, they are exchanged in `step()`;
otherwise during backward.

With `cross_barrier`, from the second step on, `step()` returns while the exchange is in
flight. Each module's forward waits for its own parameters (`hubring.workers.optimizer.forward`);
where workers step, the bucket's part of the step runs then. A step counts as completed once
its gradients are sent: it cannot be undone after that.
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
from hubring.workers.optimizer.setup import Setup, bytes_of_bucket, check_options, ignore
from hubring.workers.optimizer.tuning import Tuner
from hubring.workers.optimizer.uneven import UnevenInputs
from hubring.workers.optimizer.wrapping import OptimizerWrapper, asks_for_loss

log = logging.getLogger(__name__)


class DistributedOptimizer(OptimizerWrapper):
    """Exchanges gradients between all ranks, then steps on the worker or on the hub.

    Schedulers, hooks, `GradScaler`, closures and `state_dict` work as on any optimizer.
    `param_groups`, `state` and `defaults` are those of the wrapped optimizer. If the hub steps,
    it holds the state, and `state_dict` has only the groups. A parameter without a gradient
    counts as one with a gradient of zeros. With a `GradScaler`, all ranks skip a step that one
    rank must skip; on an asynchronous hub each rank skips on its own. On a hub each rank has its
    own loss scale.

    All ranks have the same weight. If batch sizes differ, multiply each rank's mean loss by
    `its samples * size / all samples`. Buffers are copied from rank 0 once, in the constructor.
    After that BatchNorm uses each rank's own batch and running statistics, as in DDP without
    SyncBatchNorm.
    """

    # GradScaler then leaves unscaling and skipping to step(), which asks the other ranks.
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
        """Moves parameters and gradients into flat buckets and copies rank 0's values to all ranks.

        Before this call, load the model and move it to its device and dtype. Afterwards every
        `parameter.data` and `.grad` is a view of a bucket.

        Args:
            optimizer: The optimizer of the parameters to train.
            model: Names the parameters. Its buffers and frozen parameters are copied from rank 0 as well.
            named_parameters: Names the parameters if they do not belong to one model.
            backward_passes_per_step: Backward passes that one step accumulates before the exchange.
            bucket_bytes: Maximum size of a bucket. None uses the worker's setting. If that is None too,
                the first steps measure how many bytes to send together
                (`hubring.workers.optimizer.tuning`).
            communicator: None uses the communicator of `hubring.init()`.
            after_step: Called with `completed_steps` after each step. None uses the function of
                `hubring.init()`.
            overlap: False disables exchange during backward. Set it if the script starts to change
                gradients only after the first step, or if backward reads a detached view of a parameter.
                If a hub then steps a model on the CPU, each group and dtype has one bucket and nothing is
                tuned, unless `bucket_bytes` or `cross_barrier` is set.
            cross_barrier: Let `step()` return before the parameters have arrived. The script may then read
                parameters only through modules' forwards and `state_dict`. Before any other read
                (`copy.deepcopy`, averages of weights, `torch.compile`, a penalty on weights computed
                before the model's forward) it must call `synchronize()`; otherwise it reads values of the
                previous step, which Hubring cannot always detect. Between `step()` and the next forward
                the script may change `.grad` only with `optimizer.zero_grad()`.
            uneven: Ranks may have different numbers of batches; each rank calls `join()` after its last
                step. Costs one small collective per step, which finds out whether any rank still trains.
            timeout: Seconds that one step's exchange may take. None uses the communicator's timeout.

        Raises:
            ConfigError: `model` is not a module or does not match the optimizer; the ranks' models differ
                (the error names the first difference); `cross_barrier` is set without a model or with an
                optimizer that cannot step bucket by bucket; or `uneven` is set with an option that
                excludes it.
        """
        check_model(model)
        setup = Setup.of(communicator, bucket_bytes, after_step)
        super().__init__(optimizer)
        self._communicator = communicator = setup.communicator
        self._after_step = setup.after_step
        self._steps_on_server = communicator.steps_on == "server"
        self._asks = asks_for_loss(optimizer)
        check_options(model, communicator, cross_barrier=cross_barrier, uneven=uneven, asks=self._asks)
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
        # Before BackwardPasses: hooks run in the order in which they were registered.
        self._begin_slow = setup.watch(self._tensors.exchanged)
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
        """Completed steps, including the steps before a restart. A restarted script continues from here."""
        self._asked = True
        return self._steps

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """All trained parameters by name."""
        return self._tensors.trained()

    @property
    def model_state(self) -> dict[str, torch.Tensor]:
        """The model's part of a checkpoint: parameters, buffers and frozen parameters by name."""
        return self._tensors.state()

    @property
    def exchange_seconds(self) -> float:
        """Seconds that training spent sending buckets and waiting for exchanges."""
        return self._exchange.seconds

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step on all ranks. When it returns, the parameters are updated.

        With `cross_barrier`, the update is complete only when a module's forward, `state_dict` or
        `synchronize()` reads the parameters.

        Args:
            closure: Recomputes the loss and the gradients. It is called once, before the exchange. An
                optimizer that requires a closure (LBFGS) may call it several times, each time with an
                exchange; then all ranks must pass a closure and call it equally often.

        Returns:
            The closure's result. With LBFGS, the mean of the ranks' losses.

        Raises:
            ConfigError: The script changed gradients that were already sent.
            DeadlineExceeded: The exchange took longer than the timeout.
            HubringError: The exchange failed. With `cross_barrier` the next wait raises it.
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
            self._any_trains(self._uneven_inputs, trains=True)
        if self._must_skip():
            self._begin_step()
            if self._tuner is not None:
                self._tuner.note_skip()
        else:
            self._take_step()
            self._end_step()
        return loss

    def join(self) -> None:
        """Takes part in the other ranks' steps, without a batch, until no rank has a batch left.

        In these steps this rank's gradient is zeros and counts in the mean. It copies float
        hyperparameters, such as the learning rate, from the ranks that train. So all ranks finish with
        the same parameters and `completed_steps`.

        Raises:
            ConfigError: The optimizer was made without `uneven=True`.
            HubringError: See `step`.
        """
        if self._uneven_inputs is None:
            raise ConfigError(
                "join() needs uneven=True: call DistributedOptimizer(..., uneven=True) on all ranks"
            )
        while True:
            self.zero_grad()
            if not self._any_trains(self._uneven_inputs, trains=False):
                self._begin_step()
                return
            self._take_step()
            self._end_step()

    def synchronize(self) -> None:
        """Waits until all parameters are updated. Without `cross_barrier` it returns at once.

        Raises:
            DeadlineExceeded: The exchange took longer than the timeout.
            HubringError: The exchange failed.
        """
        self._exchange.settle_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes all gradients in place. `set_to_none` has no effect: gradients are views of buckets.

        Raises:
            ConfigError: The gradients were already sent; a push cannot be undone.
        """
        if self._overlap.sent:
            raise ConfigError(
                "zero_grad() was called after the gradients were pushed during backward: call step() first;"
                f" if the script skips steps, pass {self._overlap.fix} to DistributedOptimizer"
            )
        if self._passes.count:
            self._watch.note_dropped()
        self._begin_step()
        for bucket in self._buckets:
            self._exchange.zero_gradients(bucket)

    def refresh(self) -> None:
        """Pulls the newest parameters from an asynchronous hub. Elsewhere the parameters do not change."""
        self._exchange.refresh()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer. If the hub steps, only the groups have an effect."""
        if self._steps_on_server and state_dict.get("state"):
            log.warning("load_state_dict() loaded only the parameter groups: the hub holds the state")
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
        """Returns the name of the hub's optimizer; raises ConfigError if the hub cannot run it."""
        kind: type[Optimizer] = type(self.wrapped)
        name: str = kind.__name__
        for group in self.param_groups:
            hyper_of(group, name)
        if getattr(torch.optim, name) is not kind:
            raise ConfigError(
                f"the hub can run torch.optim.{name}, but the script's optimizer is {kind.__module__}.{name}:"
                " start the workers with --aggregate; the hub then only averages, and the script's optimizer"
                " steps"
            )
        return name

    def _start_from_rank_0(self, checkpoints: Checkpoints | None) -> int:
        """Gives all ranks the same model and state; returns the completed steps to continue from."""
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

    def _any_trains(self, inputs: UnevenInputs, *, trains: bool) -> bool:
        """Whether some rank has a batch: before the hub steps, or after the mean where workers step."""
        if hasattr(self, "found_inf"):
            raise ConfigError(
                "uneven=True does not support GradScaler, because a rank in join() has no scaler:"
                " remove uneven=True or the GradScaler"
            )
        if not self._steps_on_server:
            self._exchange.finish()
        return inputs.any_trains(trains=trains)

    def _must_skip(self) -> bool:
        """Returns True if some rank's scaled gradients overflowed; otherwise unscales them."""
        if not hasattr(self, "found_inf"):
            return False
        if not self._steps_on_server and not self._exchange.complete:
            raise ConfigError(
                f"step() was called after {self._passes.count} backward pass(es), fewer than"
                " backward_passes_per_step: with a GradScaler, run all passes before every step()"
            )
        if scaling.overflowed(self.found_inf, self._communicator, self._timeout):
            return True
        scaling.unscale(self._buckets, getattr(self, "grad_scale", None))
        return False

    def _take_step(self) -> None:
        if self._overlap.crossing:
            self._exchange.leave(self._stepper.prepare() if self._stepper else ignore)
            if self._communicator.drains:
                # The answer to the first bucket has the stop request, which all ranks need now.
                self._exchange.settle(self._buckets[0])
        else:
            self._exchange.finish()
            if not self._steps_on_server:
                self.wrapped.step()
        # A scheduler of the wrapped optimizer warns if no step was taken before it.
        self.wrapped._opt_called = True  # type: ignore[attr-defined]
        self._overlap.step_taken(self._passes.count)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Computes the mean gradient and returns the mean loss, for an optimizer with a closure (LBFGS)."""
        self._begin_step()
        with torch.enable_grad():
            loss = closure()
        self._tensors.check_frozen()
        self._exchange.finish()
        mean = allreduce(torch.as_tensor(loss), name="closure.loss", communicator=self._communicator)
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    def _end_step(self) -> None:
        self._begin_step()
        # If step() sends everything at once, the group size makes no difference.
        if self._tuner is not None and self._overlap.backward:
            self._tuner.note_step()
        self._steps += 1
        if not self._asked:
            self._asked = True
            log.warning(
                "this is step %d of a restarted job, but the script did not read optimizer.completed_steps:"
                " read it to continue from that step instead of step 0",
                self._steps,
            )
        try:
            self._after_step(self._steps)
        except BaseException:
            self.synchronize()  # a worker that stops here must complete the step first
            raise
        self._begin_slow(self._steps)

    def _begin_step(self) -> None:
        self._exchange.reset()
        self._passes.reset()
        self._watch.reset()
