"""`DistributedOptimizer`, which wraps a training script's optimizer.

    steps_on     gradients are exchanged         what steps             .grad after backward
    worker       during backward                 the wrapped optimizer  the mean over all ranks
    server       during backward, or in step()   the hub                this rank's own gradient

On a hub, the first step decides. If the script clips or otherwise changes gradients after backward, the hub
averages from then on; if it changes something else, gradients are exchanged in `step()`.

A hub in lockstep that cannot step as the script asks averages instead, and the wrapped optimizer steps. With
`cross_barrier`, from the second step on, `step()` returns while the exchange is in flight, and each module's
forward waits for its own parameters (`hubring.workers.reducer.forward`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.torch_internals import note_step, runs_before_step, without_step_hooks
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import NamedParameters
from hubring.workers.collectives import allreduce
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer import model_checks, rank_checks, stepping
from hubring.workers.optimizer.entering import start
from hubring.workers.optimizer.hub_optimizer import HiddenGradients, step_on_hub
from hubring.workers.optimizer.parameters import lay_out
from hubring.workers.optimizer.setup import Setup, check_options, ignore, warn_of_restart
from hubring.workers.optimizer.stepping import BucketStepper, UnevenInputs
from hubring.workers.optimizer.wrapping import OptimizerWrapper, asks_for_loss
from hubring.workers.reducer.first_means import any_rank, can_average
from hubring.workers.reducer.groups import ParameterGroups
from hubring.workers.reducer.reducer import Reducer, ReducerOptions


class DistributedOptimizer(OptimizerWrapper):
    """Exchanges gradients between all ranks, then steps on the worker or on the hub.

    Schedulers, hooks, `GradScaler`, closures and `state_dict` work as on any optimizer.
    `param_groups`, `state` and `defaults` are those of the wrapped optimizer. A parameter that no rank has
    a gradient of is not stepped. One that some ranks have used gets the mean, with zeros from the other
    ranks, as in DDP. With a `GradScaler`, all ranks skip a step that one rank must skip; on an asynchronous
    hub each rank skips on its own. On a hub each rank has its own loss scale.

    All ranks count equally in the mean, unless the script sets `weight`. Buffers are copied from rank 0
    once, in the constructor. After that BatchNorm uses each rank's own batch and running statistics, as in
    DDP without SyncBatchNorm.
    """

    weight = property(stepping.weight_of, stepping.weigh)
    """What this rank's gradients count in the mean; see `hubring.workers.optimizer.stepping.weight_of`."""

    # GradScaler then leaves unscaling and skipping to step(), which asks the other ranks.
    _step_supports_amp_scaling = True

    @torch.inference_mode(False)  # buckets and copies of values outlive a script's inference mode
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
                the first steps measure how many bytes to send together (`hubring.workers.reducer.tuning`).
            communicator: None uses the communicator of `hubring.init()`.
            after_step: Called with `completed_steps` after each step. None uses the function of
                `hubring.init()`.
            overlap: False disables exchange during backward. Set it if the script starts only after the
                first step to change gradients after backward, or hyperparameters after backward has begun,
                for example in a hook; or if backward reads a detached view of a parameter. If a hub then
                steps a model on the CPU, each dtype has one bucket and nothing is tuned, unless
                `bucket_bytes` or `cross_barrier` is set.
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
            ConfigError: `model` is not a module, does not match the optimizer, or is given with
                `named_parameters`; the ranks' models differ (the error names the first difference);
                `cross_barrier` is set without a model or with an optimizer that cannot step bucket by bucket;
                `uneven` is set with an option that excludes it; or the model has torch's SyncBatchNorm.
        """
        setup = Setup.of(communicator, bucket_bytes, after_step)
        super().__init__(optimizer, model)
        self._setup, self._after_step, communicator = setup, setup.after_step, setup.communicator
        self._asks = asks_for_loss(optimizer)
        self._after_wrapped = ExitStack()
        model_checks.check_model(model, optimizer, communicator, named=named_parameters is not None)
        self._uneven_inputs = UnevenInputs(communicator, self) if uneven else None
        self._timeout = communicator.timeout if timeout is None else timeout
        self.ahead = int(cross_barrier)
        self._groups = ParameterGroups(optimizer)
        self._named = None if named_parameters is None else list(named_parameters)
        self._options = ReducerOptions(
            groups=self._groups,
            model=model,
            passes_per_step=backward_passes_per_step,
            overlap=overlap,
            cross_barrier=cross_barrier,
            timeout=self._timeout,
            bucket_bytes=setup.bucket_bytes,
            recorder=setup.recorder,
        )
        check_options(self._options, communicator, uneven=uneven, asks=self._asks)
        buckets = self._lay_out(communicator)
        communicator, trained = self._communicator, self._trained
        checkpoints, states = setup.checkpoints(communicator), setup.states(communicator)
        self._steps = start(self, trained, buckets, checkpoints, states)
        # Before the reducer's hooks: hooks run in the order in which they were registered.
        self._begin_slow = setup.watch(set(trained.trained().values()))
        trained.begin(buckets, self._steps)
        fresh = not trained.inherited and not self._steps
        if fresh and buckets and not uneven and can_average(communicator):
            trained.reducer.overlap.begin_with_means()
        self._first_batch = rank_checks.first_batch_of(model, communicator) if fresh else None
        self._asked = not self._steps or trained.inherited
        self._untrained = model_checks.Untrained(model, communicator, trained.all_exchanged)
        setup.adopt(self)
        if checkpoints is not None:
            checkpoints.adopt(self)
        self._begin_slow(self._steps)

    @property
    def completed_steps(self) -> int:
        """Completed steps, including the steps before a restart. A restarted script continues from here."""
        self._asked = True
        return self._steps

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """All trained parameters by name."""
        return dict(self._trained.trained())

    @property
    def model_state(self) -> dict[str, torch.Tensor]:
        """The model's part of a checkpoint: parameters, buffers and frozen parameters by name."""
        tensors = (*self._trained.trained().items(), *self._trained.rest())
        return {name: tensor.detach() for name, tensor in tensors}

    @property
    def communicator(self) -> Communicator:
        """Connects the ranks; beside a hub that steps, it may not be that of `hubring.init()`."""
        return self._communicator

    @property
    def shows_means(self) -> bool:
        """Whether gradients are means in the first step of a hub."""
        return self._trained.reducer.overlap.shows_means

    @property
    def exchange_seconds(self) -> float:
        """Seconds that training spent sending buckets and waiting for exchanges."""
        return self._trained.reducer.exchange.seconds

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
        if closure is not None:
            if self._lets_optimizer_evaluate:
                loss = self.step_wrapped(lambda: self._evaluate(closure))
                self._end_step(self._trained.reducer)
                return loss
            self._trained.checked_reducer()
            with torch.enable_grad():
                loss = closure()
        reducer = self._begin_step()
        if self._uneven_inputs is not None:
            self._uneven_inputs.any_trains(reducer, trains=True)
        if "found_inf" in vars(self) and stepping.must_skip(self, reducer, self._timeout):
            reducer.note_skip(self._groups)
        else:
            self._take_step(reducer)
            self._end_step(reducer)
        return loss

    def before_wrapped(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Makes `step()` of the wrapped optimizer this optimizer's step. Raises as `step`."""
        if self.steps_elsewhere:
            self._after_wrapped.close()  # after a step that failed
        self._after_wrapped = ExitStack()
        if self._lets_optimizer_evaluate:
            self._after_wrapped.callback(lambda: self._end_step(self._trained.reducer))
            if closure is not None:
                return lambda: self._evaluate(closure)
            self._begin_step().exchange.finish()
            return None
        loss = self.step(closure)
        self._after_wrapped.enter_context(without_step_hooks(self.wrapped))  # they have run
        self._after_wrapped.enter_context(HiddenGradients(self._trained.held)).hide()
        return None if closure is None else lambda: loss

    def after_wrapped(self) -> None:
        """Ends what `before_wrapped` began."""
        self._after_wrapped.close()

    def join(self) -> None:
        """Takes part in the other ranks' steps, without a batch, until no rank has a batch left.

        In these steps this rank has no gradient, which counts as zeros in the mean. It copies the
        hyperparameters that are numbers, such as the learning rate, from the ranks that train. So all ranks
        finish with the same parameters and `completed_steps`.

        Raises:
            ConfigError: The optimizer was made without `uneven=True`.
            HubringError: See `step`.
        """
        if self._uneven_inputs is None:
            raise ConfigError("join() needs DistributedOptimizer(..., uneven=True) on all ranks")
        while True:
            self.zero_grad()
            reducer = self._trained.reducer
            if not self._uneven_inputs.any_trains(reducer, trains=False):
                reducer.begin_turn()
                return
            self._take_step(reducer)
            self._end_step(reducer)

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
        self._trained.reducer.complete_passes()

    def settle(self) -> None:
        """Waits until all parameters are updated. Raises as `synchronize`."""
        self._trained.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, or zeroes them in place, as in torch.

        Raises:
            ConfigError: The gradients were already sent; a push cannot be undone.
        """
        self._trained.reducer.drop_gradients(hold=not set_to_none)
        self.wrapped.zero_grad(set_to_none)

    def refresh(self) -> None:
        """Pulls the newest parameters from an asynchronous hub. Elsewhere the parameters do not change."""
        self._trained.reducer.exchange.refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer. All ranks must do so between the same two steps.

        Raises:
            ConfigError: The model does not have the parameters, or the ranks add different ones. As after
                any error, the optimizer then does not have the group.
        """
        self.wrapped.add_param_group(param_group)
        try:
            self._trained.extend()
        except BaseException:
            self.wrapped.param_groups.pop()
            raise

    def _lay_out(self, communicator: Communicator) -> list[Bucket]:
        self._trained, buckets = lay_out(communicator, self.wrapped, self._named, self._options)
        self.rest = self._trained
        self._communicator = communicator = self._trained.communicator
        self.steps_elsewhere = communicator.steps_on == "server"
        self._stepper = BucketStepper(self.wrapped) if self.ahead and not self.steps_elsewhere else None
        return buckets

    def _average(self, why: str) -> Reducer:
        """Lets the wrapped optimizer step from now on. The gradients are means already."""
        self._trained.give_up()
        any_rank(self._communicator, "first gradients: given up")  # all have read their state from the hub
        buckets = self._lay_out(self._communicator.averaging(why, again=True))
        self._trained.attach(buckets)
        self._trained.add(buckets)
        self._trained.reducer.exchange.skip()
        if (checkpoints := self._setup.checkpoints(self._communicator)) is not None:
            checkpoints.adopt(self)
        return self._trained.reducer

    @property
    def _lets_optimizer_evaluate(self) -> bool:
        """Whether the wrapped optimizer calls a closure, as often as it wants."""
        return self._asks or not (self.steps_elsewhere or self.ahead or self._uneven_inputs)

    def _begin_step(self) -> Reducer:
        """Looks what the script did since the last step, and returns what exchanges the gradients."""
        reducer = self._trained.checked_reducer()
        reducer.begin_step(self._groups)
        if self._trained.extend():
            reducer = self._trained.checked_reducer()
        if self._untrained.later or self._untrained.looked != model_checks.registrations:
            self._untrained.look()
        overlap = reducer.overlap
        decides = overlap.backward is None or overlap.first_means is not None
        runs_code = decides and runs_before_step(self.wrapped)
        asks = decides or "found_inf" in vars(self)
        habit = stepping.habit(self, reducer, runs_code=runs_code) if asks else ""
        why = overlap.settle(reducer.passes.count, habit=habit, runs_code=runs_code)
        return self._average(why) if why else reducer

    def _take_step(self, reducer: Reducer) -> None:
        exchange = reducer.exchange
        if self.ahead and reducer.crosses:
            exchange.leave(self._stepper.prepare() if self._stepper else ignore)
            if self._communicator.draining is not None:  # the answer to the first bucket has the stop request
                exchange.settle(exchange.buckets[0])
        elif self.steps_elsewhere:
            step_on_hub(self, exchange.finish, reducer.overlap.check)
        else:
            exchange.finish()
            self.step_wrapped()
        note_step(self.wrapped)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Computes the mean gradient and the loss for an optimizer that calls the closure itself."""
        self._trained.reducer.begin_turn()
        with torch.enable_grad():
            loss = closure()
        self._trained.extend()
        self._untrained.look()
        self._trained.reducer.exchange.finish()
        if not self._asks:
            return loss
        given = isinstance(loss, torch.Tensor)
        own = loss if given else torch.tensor(loss, dtype=torch.float64, device="cpu")
        mean = allreduce(own, name="closure.loss", communicator=self._communicator)
        return mean if given else mean.item()

    def _end_step(self, reducer: Reducer) -> None:
        self._steps += 1
        reducer.note_step(self._groups, self._steps)
        if not self.steps_elsewhere and self._communicator.size > 1 and rank_checks.due(self._steps):
            self.settle()  # with cross_barrier
            rank_checks.check_same_parameters(self._trained.trained(), self._communicator, self.wrapped)
        if self._first_batch is not None:
            self._first_batch.compare(weighted=self.weight is not None)
            self._first_batch = None
        if not self._asked:
            self._asked = True
            warn_of_restart(self._steps)
        try:
            self._after_step(self._steps)
        except BaseException:
            self.settle()  # a worker that stops here must complete the step first
            raise
        self._begin_slow(self._steps)
