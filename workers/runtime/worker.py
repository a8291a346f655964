"""A worker between `init` and `shutdown`: its communicator, optimizers, metrics and stop requests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hubring.ps.client.session import Session
from hubring.ps.config.environment import take
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.counters import gpu_use, usage
from hubring.ps.core.errors import Preempted
from hubring.ps.job import telemetry
from hubring.ps.job.telemetry import Telemetry
from hubring.ps.observe import logs
from hubring.workers.communicators.base import Communicator
from hubring.workers.launchers.known_launchers import PROGRESS_VARIABLE
from hubring.workers.launchers.placement import Placement
from hubring.workers.runtime import training_record
from hubring.workers.runtime.conditions import ConditionWatch
from hubring.workers.runtime.metric_export import MetricExport
from hubring.workers.runtime.progress_line import ProgressLine
from hubring.workers.runtime.slowdown import Slowdown, SlowdownSettings
from hubring.workers.runtime.training_record import FlightRecorder, Record, what_waits

if TYPE_CHECKING:
    from hubring.workers.audit.audit import Audit


class Trainer(Protocol):
    """What a worker needs from an optimizer."""

    @property
    def exchange_seconds(self) -> float:
        """Seconds so far that training waited for exchanges."""

    @property
    def completed_steps(self) -> int:
        """Completed steps, including the steps before a restart."""

    ahead: int
    """Steps that another rank can be ahead of this one: 1 if `step()` does not wait, else 0."""

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """All trained parameters by name."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, with their learning rates."""

    def settle(self) -> None:
        """Waits until the parameters are the last step's result."""


class Saves(Protocol):
    """Saves the state of a job whose workers step: `hubring.workers.optimizer.checkpoints`.

    Where the hub steps, sends it what the workers have: `hubring.workers.optimizer.own_state`.
    """

    due_at: float
    """The step after which to call `save_in_passing`."""

    def save_in_passing(self) -> None:
        """Saves a periodic checkpoint if it is time. Logs a failure and does not raise it."""

    def save(self) -> None:
        """Saves the last step."""

    def save_together(self) -> None:
        """Saves the last step. Returns on every rank only once it is saved."""

    def close(self) -> None:
        """Releases the folder."""


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """The state of this worker."""

    config: WorkerConfig
    placement: Placement
    communicator: Communicator
    device: torch.device
    session: Session | None
    record: Record
    origin: logs.LogOrigin
    cpu_before: int = 0
    """CPU time that the process used before training began, in nanoseconds."""
    job: str = ""
    """Name of the script or built-in job."""
    completed_steps: int = 0
    resumed_at: int = 0
    """The steps that were completed before this process's first one."""
    stop_code: int | None = None
    """Set by a signal handler: stop after this step and exit with this code."""
    leaving: bool = False
    """This worker stops: it saves what it must save, then leaves."""
    step_seconds: float = 0.0
    """How long the last step took."""
    stepped: float = 0.0
    """When the last step ended, in monotonic seconds."""
    notice: bool = False
    """The signal was a scheduler's notice (SIGUSR1), which is for the whole job."""
    trainers: list[Trainer] = field(default_factory=list)
    counted: Callable[[], object] = lambda: None
    """Returns the script's optimizer whose steps `context.count_step` counts, while there is one."""
    device_types: set[str] = field(default_factory=set)
    """Where the trained parameters are: `cpu`, `cuda`."""
    saves: Saves | None = None
    give_state: Callable[[list[Trainer]], None] = field(default=lambda _: None)
    """Gives workers that enter a ring the state of these optimizers. All members call it."""
    recorder: FlightRecorder | None = None
    progress_line: ProgressLine | None = None
    export: MetricExport | None = None
    hardship: Slowdown | None = None
    """Makes this worker slow in an experiment."""
    audit: Audit | None = None
    """Records steps for the gate of a comparison."""
    conditions: ConditionWatch | None = None
    """Records under which conditions they are taken."""
    nonfinite_reports: int = 0
    """Number of consecutive reports with a value that is not finite."""
    warned_of_nan: bool = False
    """Whether a parameter was found that is not finite."""
    pid: int = field(default_factory=os.getpid)
    """The process that joined. A forked child (a DataLoader's, for example) must not leave the job."""

    def __post_init__(self) -> None:
        if self.config.report_to is not None:
            self.export = MetricExport(self.config.report_to)
        if self.session is not None:
            self.session.telemetry = self._telemetry
        if file := take(PROGRESS_VARIABLE):  # not for jobs that the script starts
            self.progress_line = ProgressLine(Path(file))

    def adopt(self, trainer: Trainer) -> None:
        """Adds an optimizer and restarts the clock. The optimizer calls it when its model is ready.

        It replaces earlier optimizers that have no other parameters, because a script may make a new one of
        the same parameters.
        """
        own = set(map(id, trainer.named_parameters.values()))
        others = [one for one in self.trainers if not own.issuperset(map(id, one.named_parameters.values()))]
        self.trainers = [*others, trainer]
        self.device_types |= {one.device.type for one in trainer.named_parameters.values()}
        if self.audit is not None:
            self.audit.adopt(trainer)
        self.record.begin()
        self.cpu_before = usage().cpu_ns

    def emulate(self, slowness: SlowdownSettings) -> None:
        """Slows this worker down. Call it before the first optimizer is made."""
        self.hardship = Slowdown(slowness, self.communicator.rank, lambda: self._waited)

    def watch(self, parameters: Iterable[torch.Tensor]) -> Callable[[int], None]:
        """Watches the gradients of an optimizer's parameters for an emulated slowdown.

        The optimizer calls it before other hooks are registered on these parameters.

        Returns:
            A function that the optimizer calls at the beginning of each step, with its completed
            steps. With several optimizers only the first one's steps count.
        """
        if self.hardship is None or self.trainers:
            return unwatched
        self.hardship.watch(parameters)
        return self.hardship.begin

    def synchronize(self) -> None:
        """Waits for exchanges that the last steps left in flight; raises their errors."""
        for trainer in self.trainers:
            trainer.settle()

    def step_completed(self, step: int) -> None:
        """Records a step and handles stop requests. The optimizer calls it after each step.

        Raises:
            Preempted: The hub is draining, or a signal asked this worker to stop.
        """
        self.completed_steps = self.record.step = self.origin.step = step
        if self.audit is not None:
            self.audit.step_completed()
            if self.conditions is not None:
                self.conditions.step_completed(self.audit.evaluations)
        if not self.stepped:
            self.resumed_at = step - 1
        now = time.monotonic()
        self.step_seconds, self.stepped = now - (self.stepped or now), now
        if self.recorder is not None:
            self.recorder.stepped(step)
        if self.session is not None:
            self.session.step = step
        if step == self.config.save_parameters_at and self.communicator.rank == 0:
            self._save_early(step)
        if self.communicator.draining:
            again = "; restart the server and the workers to continue from the last checkpoint"
            then = again if self._is_saved else ""
            self._stop(f"the server was asked to stop: all workers stop after this step{then}")
        if self.communicator.topology == "ring":
            self._handle_ring_stop(step)
        elif self.stop_code is not None:
            self._handle_stop()
        if step.bit_count() == 1 and not self.warned_of_nan:
            self.warned_of_nan = training_record.look_for_nan(self.trainers, self.communicator, step)
        if self.saves is not None and step >= self.saves.due_at:
            self.saves.save_in_passing()
        members = self.communicator.members
        if members is not None and members.between_steps(step):
            self.give_state(self.trainers)

    def _save_early(self, step: int) -> None:
        """Writes the parameters after `--save-parameters-at` steps."""
        path = self.config.save_parameters
        assert path is not None
        self.synchronize()
        save_parameters(path.with_stem(f"{path.stem} step{step}"), self.trainers)

    @property
    def stops_all(self) -> bool:
        """Whether all workers stop when this one is asked to. They must if this worker runs a shard."""
        policy = self.config.on_preempt
        together = policy == "all" or (policy == "auto" and self.placement.ends_together)
        return self.session is not None and (self.notice or together or self.session.serves)

    def _handle_stop(self) -> None:
        """Handles a stop request: this worker stops now, or all workers stop after the same step."""
        if self.session is None or not self.stops_all:
            self._stop("stopped on request after this step")
        elif not self.session.stopping:
            self.session.stop_hub()

    def _handle_ring_stop(self, step: int) -> None:
        """Handles a stop request on a ring.

        All members must complete the same steps. The member that is asked to stop sets the last step,
        and every member trains until then.
        """
        session = self.session
        assert session is not None
        if (self.stop_code is not None or session.draining) and not session.stop_after:
            ahead = max((trainer.ahead for trainer in self.trainers), default=0)
            session.stop_ring(step + 1 + ahead)
        if session.stop_after and step >= session.stop_after:
            self._stop("all workers stop after this step")

    def _stop(self, text: str) -> None:
        self.leaving = True
        self.synchronize()
        if self.saves is not None:
            self.saves.save_together()
        if not self._is_saved and self.communicator.rank == 0:
            log.warning("nothing is saved: no --checkpoint-dir is set; a restarted job starts from step 0")
        raise Preempted(text, self.stop_code or Preempted.exit_code)

    @property
    def _is_saved(self) -> bool:
        """Whether a restarted job continues from a checkpoint, of the workers or of the server."""
        if self.communicator.steps_on == "server":
            return self.session is not None and self.session.saves
        return self.saves is not None

    def report(self, metrics: dict[str, Any]) -> None:
        """Records metrics and sends the loss to the hub.

        Raises:
            NonFinite: A metric and a parameter are NaN or infinite: training has diverged.
        """
        self.record.report(metrics, self._exposed, self._hidden)
        reported = {name: self.record.latest[name] for name in metrics}
        if self.export is not None and self.communicator.rank == 0:
            self.export.write(self.completed_steps, reported, self.record.samples, time.monotonic())
        nonfinite = any(isinstance(value, float) and not isfinite(value) for value in reported.values())
        self.nonfinite_reports = self.nonfinite_reports + 1 if nonfinite else 0
        # A metric may stay NaN while training is healthy. So check after 1, 2, 4, 8... such reports.
        if self.nonfinite_reports.bit_count() == 1:
            training_record.check_finite(self.trainers, self.communicator.rank, self.completed_steps)
        loss = self.record.latest.get("loss")
        if self.session is not None and isinstance(loss, (int, float)):
            self.session.loss = float(loss)

    def _telemetry(self) -> Telemetry:
        """Returns what the next heartbeat carries. The heartbeat's thread calls it once per second."""
        reported, used = self.record.latest.copy(), usage()
        if self.progress_line is not None:
            # A full disk, or endless training, must not keep the rest from the server.
            with suppress(OSError, OverflowError):
                self.progress_line.note(self.completed_steps, self.record.samples, reported, time.monotonic())
        waits = {} if self.session is None else what_waits(self.session.waiting, self.communicator)
        rates = (group.get("lr") for trainer in self.trainers[:1] for group in trainer.param_groups[:1])
        return Telemetry(
            metrics=telemetry.shown([*(("lr", rate) for rate in rates), *reported.items()]),
            samples=self.record.samples,
            progress=telemetry.reported_progress(reported, self.completed_steps),
            total_steps=telemetry.reported_total(reported),
            cpu_seconds=used.cpu_ns / 1e9,
            memory_bytes=used.memory_bytes,
            gpu_bytes=used.gpu_bytes,
            gpu_use=gpu_use(),
            **waits,
        )

    @property
    def _waited(self) -> float:
        """Seconds so far that the training thread waited for exchanges."""
        return sum(trainer.exchange_seconds for trainer in self.trainers)

    @property
    def _exposed(self) -> float | None:
        """Seconds so far that training waited for exchanges; None if parameters are on a GPU.

        The host does not see that wait there: it only queues NCCL's work, and on a hub it also waits for the
        GPU to compute the gradients.
        """
        return None if "cuda" in self.device_types else round(self._waited, 6)

    @property
    def _hidden(self) -> float | None:
        """Seconds so far of exchange that overlapped with compute; None without a recorder or on a GPU."""
        if self.recorder is None or "cuda" in self.device_types:
            return None
        return round(self.recorder.hidden_seconds, 6)

    def result(self) -> dict[str, Any]:
        """Returns the result so far, for the program's last line. A metric that is not finite is text."""
        traffic = self.communicator.traffic
        pushes = sum(traffic.staleness.values())
        used = usage()
        parts, conditions = {"emulated": self.hardship, "audit": self.audit}, {}
        if self.conditions is not None:
            ahead = any(trainer.ahead for trainer in self.trainers)
            conditions = {"conditions": self.conditions.report(self.hardship, self.audit, ahead=ahead)}
        return {
            "rank": self.communicator.rank,
            "size": self.communicator.size,
            "topology": self.communicator.topology,
            "backend": self.communicator.backend,
            "mode": self.session.mode if self.session and self.communicator.topology == "hub" else "",
            "device": ", ".join(sorted(self.device_types)),
            "steps": self.completed_steps,
            "resumed_at": self.resumed_at,
            "seconds": round(self.record.seconds, 6),
            "metrics": {name: _in_json(value) for name, value in self.record.latest.items()},
            "exchange": {
                "bytes_sent": traffic.bytes_sent,
                "bytes_received": traffic.bytes_received,
                "exposed_seconds": self._exposed,
                "hidden_seconds": self._hidden,
                "staleness_mean": sum(value * count for value, count in traffic.staleness.items())
                / max(1, pushes),
                "staleness_max": max(traffic.staleness, default=0),
                "staleness": {str(value): count for value, count in sorted(traffic.staleness.items())},
            },
            "usage": {
                "cpu_seconds": round((used.cpu_ns - self.cpu_before) / 1e9, 6),
                "peak_bytes": used.peak_bytes,
                "gpu_bytes": used.gpu_bytes,
            },
            **{name: {"seconds": round(part.seconds, 6)} for name, part in parts.items() if part is not None},
            **conditions,
            **({} if self.communicator.members is None else self.communicator.members.report()),
        }


def _in_json(value: Any) -> Any:
    """Returns `"nan"`, `"inf"` or `"-inf"` for a number that JSON does not have."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def save_parameters(path: Path, trainers: list[Trainer]) -> None:
    """Writes all trained parameters by name to a safetensors file."""
    from safetensors.torch import save_file

    tensors = {
        name: parameter.detach().cpu().clone().contiguous()
        for trainer in trainers
        for name, parameter in trainer.named_parameters.items()
    }
    save_file(tensors, path)


def unwatched(_: int) -> None:
    """Does nothing: the default for the function that `Worker.watch` returns."""
