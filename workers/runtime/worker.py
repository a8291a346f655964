"""A worker between `init` and `shutdown`: its place, its communicator, its report, and when it stops."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from hubring.ps.client.session import Session
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.counters import usage
from hubring.ps.core.errors import Preempted
from hubring.ps.observe import logs
from hubring.workers.communicators.base import Communicator
from hubring.workers.launchers.placement import Placement
from hubring.workers.runtime import finite
from hubring.workers.runtime.in_flight import FlightRecorder
from hubring.workers.runtime.record import Record
from hubring.workers.runtime.trainer import Saves, Trainer
from hubring.workers.slowdown.delays import Slowness
from hubring.workers.slowdown.hardship import Hardship

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """Everything that belongs to this worker, and what its training loop asks for."""

    config: WorkerConfig
    placement: Placement
    communicator: Communicator
    device: torch.device
    session: Session | None
    record: Record
    origin: logs.LogOrigin
    cpu_before: int = 0
    """What the process had used before training began, in nanoseconds."""
    job: str = ""
    """Name of the script or built-in job."""
    completed_steps: int = 0
    stop_code: int | None = None
    """Set by a signal handler: leave after this step, with this exit code."""
    notice: bool = False
    """The signal was a scheduler's notice, which is for the whole job."""
    trainers: list[Trainer] = field(default_factory=list)
    saves: Saves | None = None
    recorder: FlightRecorder | None = None
    hardship: Hardship | None = None
    """What makes this worker slow in an experiment."""
    odd_reports: int = 0
    """How many in a row held what is not finite."""
    pid: int = field(default_factory=os.getpid)
    """Whose place it is: a forked child, of a DataLoader say, has a copy that it must not give back."""

    def adopt(self, trainer: Trainer) -> None:
        """Called by an optimizer whose model is in place: training begins."""
        self.trainers.append(trainer)
        self.record.begin()
        self.cpu_before = usage().cpu_ns

    def emulate(self, slowness: Slowness) -> None:
        """Makes this worker as slow as that says; before its first optimizer is made."""
        self.hardship = Hardship(slowness.of(self.communicator.rank), lambda: self._exposed)

    def watch(self, parameters: Iterable[torch.Tensor]) -> Callable[[int], None]:
        """Called by an optimizer before others ask to be told of these parameters' gradients.

        Returns:
            What it is to call with its completed steps, at the beginning of each. A step of several
            optimizers is one step, the first one's.
        """
        if self.hardship is None or self.trainers:
            return unwatched
        self.hardship.watch(parameters)
        return self.hardship.begin

    def synchronize(self) -> None:
        """Waits for what the last steps left under way, and raises what it failed with."""
        for trainer in self.trainers:
            trainer.synchronize()

    def step_completed(self, step: int) -> None:
        """Called by the optimizer after each step; where it learns of the end.

        Raises:
            Preempted: The hub drains, or a signal asked this worker to stop.
        """
        self.completed_steps = self.record.step = self.origin.step = step
        if self.recorder is not None:
            self.recorder.stepped(step)
        if self.session is not None:
            self.session.step = step
        if step == self.config.save_parameters_at and self.communicator.rank == 0:
            self._save_early(step)
        if self.communicator.draining:
            self._stop(
                "the hub was asked to stop, and all workers stop with it after this step: start both again,"
                " and the job goes on from the last checkpoint"
            )
        if self.communicator.topology == "ring":
            self._heed_ring(step)
        elif self.stop_code is not None:
            self._heed()
        if self.saves is not None and self.saves.due:
            self.synchronize()
            self.saves.save_in_passing()

    def _save_early(self, step: int) -> None:
        """Writes the parameters as they are after this step."""
        path = self.config.save_parameters
        assert path is not None
        self.synchronize()
        save_parameters(path.with_stem(f"{path.stem} step{step}"), self.trainers)

    @property
    def stops_all(self) -> bool:
        """Whether the others stop when this worker is asked to: they must, where it brought a shard."""
        policy = self.config.on_preempt
        together = policy == "all" or (policy == "auto" and self.placement.ends_together)
        return self.session is not None and (self.notice or together or self.session.serves)

    def _heed(self) -> None:
        """This worker was asked to stop: alone it does so here, with others after a common step."""
        if self.session is None or not self.stops_all:
            self._stop("stopped on request after this step")
        elif not self.session.stopping:
            self.session.stop_hub()

    def _heed_ring(self, step: int) -> None:
        """Members of a ring complete the same steps: who is asked to stop says after which, and waits."""
        session = self.session
        assert session is not None
        if (self.stop_code is not None or session.draining) and not session.stop_after:
            ahead = max((trainer.ahead for trainer in self.trainers), default=0)
            session.stop_ring(step + 1 + ahead)
        if session.stop_after and step >= session.stop_after:
            self._stop("all workers stop after this step")

    def _stop(self, text: str) -> None:
        self.synchronize()
        if self.saves is not None:
            self.saves.save_together()
        elif self.communicator.steps_on == "worker" and self.communicator.rank == 0:
            log.warning("nothing is saved, as nobody gave --checkpoint-dir: started again, it begins anew")
        raise Preempted(text, self.stop_code or Preempted.exit_code)

    def report(self, metrics: dict[str, Any]) -> None:
        """Records metrics, and lets the hub know of the loss.

        Raises:
            NonFinite: One is NaN or infinite, and so is a parameter: training is lost.
        """
        self.record.report(metrics, self._exposed, self._hidden)
        told = [self.record.latest[name] for name in metrics]
        odd = any(isinstance(value, float) and not isfinite(value) for value in told)
        self.odd_reports = self.odd_reports + 1 if odd else 0
        # A metric may stay NaN for good while training is well: then one looks after 1, 2, 4, 8... reports.
        if self.odd_reports.bit_count() == 1:
            self.synchronize()
            parameters = (trainer.named_parameters for trainer in self.trainers)
            finite.check(parameters, self.communicator.rank, self.completed_steps)
        loss = self.record.latest.get("loss")
        if self.session is not None and isinstance(loss, (int, float)):
            self.session.loss = float(loss)

    @property
    def _exposed(self) -> float:
        """Seconds that exchanges took from training so far."""
        return sum(trainer.exchange_seconds for trainer in self.trainers)

    @property
    def _hidden(self) -> float | None:
        """Seconds for which exchanges were on their way behind computing; None where nobody looks."""
        return None if self.recorder is None else self.recorder.hidden_seconds

    def result(self) -> dict[str, Any]:
        """How it went so far, for the program's last line."""
        traffic = self.communicator.traffic
        pushes = sum(traffic.staleness.values())
        used, hidden = usage(), self._hidden
        emulated = {} if self.hardship is None else {"emulated": {"seconds": round(self.hardship.seconds, 6)}}
        return {
            "rank": self.communicator.rank,
            "size": self.communicator.size,
            "topology": self.communicator.topology,
            "mode": self.session.mode if self.session and self.communicator.topology == "hub" else "",
            "steps": self.completed_steps,
            "seconds": round(self.record.seconds, 6),
            "metrics": self.record.latest,
            "exchange": {
                "bytes_sent": traffic.bytes_sent,
                "bytes_received": traffic.bytes_received,
                "exposed_seconds": round(self._exposed, 6),
                "hidden_seconds": None if hidden is None else round(hidden, 6),
                "staleness_mean": sum(value * count for value, count in traffic.staleness.items())
                / max(1, pushes),
                "staleness_max": max(traffic.staleness, default=0),
                "staleness": {str(value): count for value, count in sorted(traffic.staleness.items())},
            },
            "usage": {
                "cpu_seconds": round((used.cpu_ns - self.cpu_before) / 1e9, 6),
                "peak_bytes": used.peak_bytes,
            },
            **emulated,
        }


def save_parameters(path: Path, trainers: list[Trainer]) -> None:
    """Writes all trained parameters, by name, as a safetensors file."""
    from safetensors.torch import save_file

    tensors = {
        name: parameter.detach().cpu().clone().contiguous()
        for trainer in trainers
        for name, parameter in trainer.named_parameters.items()
    }
    save_file(tensors, path)


def unwatched(_: int) -> None:
    """What a step begins with that nobody slows down."""
