"""`DistributedOptimizer`, which wraps a training script's optimizer.

    steps_on     gradients are exchanged         what steps             .grad after backward
    worker       during backward                 the wrapped optimizer  the mean over all ranks
    server       during backward, or in step()   the hub                this rank's own gradient

On a hub, the first step decides when gradients are exchanged. If the script unscales,
clips or otherwise changes gradients after backward, they are exchanged in `step()`;
otherwise during backward.

With `cross_barrier`, from the second step on, `step()` returns while the exchange is in
flight. Each module's forward waits for its own parameters (`hubring.workers.reducer.forward`);
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
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.layout import NamedParameters
from hubring.workers.collectives import allreduce
from hubring.workers.collectives.named_tensors import share_from_rank_0
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer import scaling
from hubring.workers.optimizer.bucket_steps import Stepper
from hubring.workers.optimizer.checkpoints import Checkpoints
from hubring.workers.optimizer.first_batch import first_batch_of
from hubring.workers.optimizer.hub_step import HubStep
from hubring.workers.optimizer.model_tensors import check_batch_norm, check_model
from hubring.workers.optimizer.newcomers import enter
from hubring.workers.optimizer.reducers import Reducers
from hubring.workers.optimizer.same_state import check_same_state
from hubring.workers.optimizer.setup import Setup, check_options, ignore
from hubring.workers.optimizer.uneven import UnevenInputs
from hubring.workers.optimizer.wrapping import OptimizerWrapper, asks_for_loss
from hubring.workers.reducer.reducer import Reducer, Wishes

log = logging.getLogger(__name__)


class DistributedOptimizer(OptimizerWrapper):
    """Exchanges gradients between all ranks, then steps on the worker or on the hub.

    Schedulers, hooks, `GradScaler`, closures and `state_dict` work as on any optimizer.
    `param_groups`, `state` and `defaults` are those of the wrapped optimizer. A parameter that no rank has
    a gradient of is not stepped. One that some ranks have used gets the mean, with zeros from the other
    ranks, as in DDP. With a `GradScaler`, all ranks skip a step that one rank must skip; on an asynchronous
    hub each rank skips on its own. On a hub each rank has its own loss scale.

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
        """Copies rank 0's values to all ranks and prepares the exchange of gradients.

        Before this call, load the model and move it to its device and dtype. A gradient becomes a view of a
        bucket once backward has made it. Where the hub steps, every `parameter.data` is a view of a bucket
        too.

        Args:
            optimizer: The optimizer of the parameters to train.
            model: Names the parameters. Its buffers and frozen parameters are copied from rank 0 as well.
            named_parameters: Names the parameters if they do not belong to one model.
            backward_passes_per_step: Backward passes that one step accumulates before the exchange.
            bucket_bytes: Maximum size of a bucket. None uses the worker's setting. If that is None too,
                the first steps measure how many bytes to send together
                (`hubring.workers.reducer.tuning`).
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
                optimizer that cannot step bucket by bucket; `uneven` is set with an option that
                excludes it; or the model has torch's SyncBatchNorm, which would not synchronize.
        """
        check_model(model)
        setup = Setup.of(communicator, bucket_bytes, after_step)
        super().__init__(optimizer)
        self._communicator = communicator = setup.communicator
        self._after_step = setup.after_step
        self._steps_on_server = self._hub_holds_state = communicator.steps_on == "server"
        self._asks = asks_for_loss(optimizer)
        check_batch_norm(model, communicator)
        check_options(model, communicator, cross_barrier=cross_barrier, uneven=uneven, asks=self._asks)
        self._uneven_inputs = UnevenInputs(communicator, optimizer) if uneven else None
        self._stepper = None if self._steps_on_server or not cross_barrier else Stepper(optimizer)
        self._hub_step = HubStep(optimizer)
        self._timeout = communicator.timeout if timeout is None else timeout
        self.ahead = int(cross_barrier)
        wishes = Wishes(
            passes_per_step=backward_passes_per_step,
            overlap=overlap,
            cross_barrier=cross_barrier,
            timeout=self._timeout,
            bucket_bytes=setup.bucket_bytes,
            recorder=setup.recorder,
        )
        self._reducers = Reducers(communicator, optimizer, model, named_parameters, wishes)
        buckets = self._reducers.lay_out()
        self._steps = self._start_from_rank_0(buckets, setup.checkpoints)
        # Before the reducer's hooks: hooks run in the order in which they were registered.
        self._begin_slow = setup.watch(self._reducers.parameters.union(*(one.parameters for one in buckets)))
        self._reducers.add(buckets)
        if communicator.heals:
            self._reducers.begin_at(self._steps)
        compares = not self._reducers.inherited and not self._steps
        self._first_batch = first_batch_of(model, communicator) if compares else None
        self._asked = not self._steps or self._reducers.inherited
        setup.adopt(self)
        if setup.checkpoints is not None:
            setup.checkpoints.adopt(self)
        self._begin_slow(self._steps)

    @property
    def completed_steps(self) -> int:
        """Completed steps, including the steps before a restart. A restarted script continues from here."""
        self._asked = True
        return self._steps

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """All trained parameters by name."""
        return self._reducers.tensors.trained()

    @property
    def model_state(self) -> dict[str, torch.Tensor]:
        """The model's part of a checkpoint: parameters, buffers and frozen parameters by name."""
        return self._reducers.tensors.state()

    @property
    def exchange_seconds(self) -> float:
        """Seconds that training spent sending buckets and waiting for exchanges."""
        return sum(reducer.exchange.seconds for reducer in self._reducers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step on all ranks. When it returns, the parameters are updated.

        With `cross_barrier`, the update is complete only when a module's forward, `state_dict` or
        `synchronize()` reads the parameters.

        Args:
            closure: Recomputes the loss and the gradients. On a hub that steps, and with `cross_barrier` or
                `uneven`, it is called once, before the exchange. Otherwise the wrapped optimizer calls it,
                maybe several times (LBFGS, SAM), each time with an exchange; then all ranks must pass a
                closure and call it equally often.

        Returns:
            The closure's result. With LBFGS, the mean of the ranks' losses.

        Raises:
            ConfigError: The script changed gradients that were sent, or parameters differently on two ranks.
            DeadlineExceeded: The exchange took longer than the timeout.
            HubringError: The exchange failed. With `cross_barrier` the next wait raises it.
            Preempted: The job stops at this step.
        """
        loss = None
        if closure is not None and self._lets_optimizer_evaluate:
            loss = self.wrapped.step(lambda: self._evaluate(closure))
            self._end_step()
            return loss
        self._reducers.check_owner()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reducers.begin_step()
        for reducer in self._reducers:
            reducer.overlap.settle(reducer.passes, habit=self._habit(reducer))
        if self._uneven_inputs is not None:
            self._any_trains(self._uneven_inputs, trains=True)
        if self._must_skip():
            self._reducers.note_skip()
        else:
            self._take_step()
            self._end_step()
        return loss

    def join(self) -> None:
        """Takes part in the other ranks' steps, without a batch, until no rank has a batch left.

        In these steps this rank has no gradient, which counts as zeros in the mean. It copies float
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
                self._reducers.begin_turn()
                return
            self._take_step()
            self._end_step()

    def synchronize(self) -> None:
        """Completes what is under way, so that the script may read or change it.

        Where workers step, it exchanges the gradients of an accumulation that ended before
        `backward_passes_per_step`. With `cross_barrier` it waits until all parameters are updated. Otherwise
        it returns at once.

        Raises:
            DeadlineExceeded: The exchange took longer than the timeout.
            HubringError: The exchange failed.
        """
        self.settle()
        self._reducers.complete_passes()

    def settle(self) -> None:
        """Waits until all parameters are updated. Raises as `synchronize`."""
        self._reducers.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, or zeroes them in place, as in torch.

        Raises:
            ConfigError: The gradients were already sent; a push cannot be undone.
        """
        self._reducers.drop_gradients()
        if not set_to_none:
            self._reducers.hold_gradients()
        self.wrapped.zero_grad(set_to_none)

    def refresh(self) -> None:
        """Pulls the newest parameters from an asynchronous hub. Elsewhere the parameters do not change."""
        for reducer in self._reducers:
            reducer.exchange.refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer. All ranks must do so between the same two steps.

        Raises:
            ConfigError: The model does not have the parameters, or the ranks add different ones. As after
                any error, the optimizer then does not have the group.
        """
        self.wrapped.add_param_group(param_group)
        try:
            self._reducers.extend()
        except BaseException:
            self.wrapped.param_groups.pop()
            raise

    def _start_from_rank_0(self, buckets: list[Bucket], checkpoints: Checkpoints | None) -> int:
        """Gives all ranks the same model and state; returns the completed steps to continue from."""
        if self._communicator.awaits_state:
            self._reducers.attach(buckets)
            return enter(self, self._communicator)
        if checkpoints is not None:
            checkpoints.load(self)
        # A late worker, which is refused in attach(), must not wait for the others before that.
        if not (self._steps_on_server or self._reducers.inherited or self._communicator.late):
            check_same_state(self.wrapped, self._communicator)
        step = self._reducers.attach(buckets)
        if not self._communicator.late:
            share_from_rank_0(self._reducers.tensors.rest(), self._communicator, "model.rest", self._timeout)
        return step if checkpoints is None else max(step, checkpoints.share(self))

    # The step.

    @property
    def _lets_optimizer_evaluate(self) -> bool:
        """Whether the wrapped optimizer calls a closure, as often as it wants."""
        return self._asks or not (self._steps_on_server or self.ahead or self._uneven_inputs)

    def _habit(self, reducer: Reducer) -> str:
        """Returns why gradients must wait for `step()`, apart from changes to them; empty if nothing."""
        if hasattr(self, "found_inf"):
            return "uses a GradScaler"
        if reducer.overlap.backward is None and self._hub_step.runs_before:
            return "runs code of its own before the wrapped optimizer's step()"
        if reducer.overlap.backward is None and self._reducers.passes.exceeded:
            return "runs backward more often than backward_passes_per_step"
        return ""

    def _any_trains(self, inputs: UnevenInputs, *, trains: bool) -> bool:
        """Whether some rank has a batch: before the hub steps, or after the mean where workers step."""
        if hasattr(self, "found_inf"):
            raise ConfigError(
                "uneven=True does not support GradScaler, because a rank in join() has no scaler:"
                " remove uneven=True or the GradScaler"
            )
        if not self._steps_on_server:
            self._reducers.finish()
        return inputs.any_trains(trains=trains)

    def _must_skip(self) -> bool:
        """Returns True if some rank's scaled gradients overflowed; otherwise unscales them."""
        if not hasattr(self, "found_inf"):
            return False
        for reducer in self._reducers:
            if not self._steps_on_server and not reducer.exchange.complete:
                raise ConfigError(
                    f"step() was called after {self._reducers.passes.count} backward pass(es), fewer than"
                    " backward_passes_per_step: with a GradScaler, run all passes before every step(), or"
                    " call optimizer.synchronize() before scaler.step(optimizer)"
                )
        if scaling.overflowed(self.found_inf, self._communicator, self._timeout):
            return True
        scaling.unscale(self._reducers.held, getattr(self, "grad_scale", None))
        return False

    def _take_step(self) -> None:
        if self.ahead and all(reducer.overlap.crossing for reducer in self._reducers):
            for reducer in self._reducers:
                reducer.exchange.leave(self._stepper.prepare() if self._stepper else ignore)
            if self._communicator.drains:  # the answer to the first bucket has the stop request
                first = next(iter(self._reducers))
                first.exchange.settle(first.buckets[0])
        elif self._steps_on_server:
            self._hub_step.run(self._reducers.finish)
        else:
            self._reducers.finish()
            self.wrapped.step()
        # Else a scheduler of the wrapped optimizer warns.
        self.wrapped._opt_called = True  # type: ignore[attr-defined]
        for reducer in self._reducers:
            reducer.overlap.step_taken(reducer.passes)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Computes the mean gradient and the loss for an optimizer that calls the closure itself."""
        self._reducers.begin_turn()
        with torch.enable_grad():
            loss = closure()
        self._reducers.extend()
        self._reducers.finish()
        if not self._asks:
            return loss
        mean = allreduce(torch.as_tensor(loss), name="closure.loss", communicator=self._communicator)
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    def _end_step(self) -> None:
        self._steps += 1
        self._reducers.note_step(self._steps)
        if self._first_batch is not None:
            self._first_batch.compare()
            self._first_batch = None
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
            self.settle()  # a worker that stops here must complete the step first
            raise
        self._begin_slow(self._steps)
