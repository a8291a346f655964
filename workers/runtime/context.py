"""What a training script stands on: its place, its communicator, its report.

This is the one file that knows which topologies there are. It builds the
communicator that the settings name; everything else sees the interface.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from traceback import format_exception_only
from typing import Any

import torch
from msgspec.structs import replace

from hubring.ps.client.client import KVClient
from hubring.ps.client.session import Session
from hubring.ps.config.address import address, is_loopback
from hubring.ps.config.environment import environment
from hubring.ps.config.sources import load_worker
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError, HubringError, NonFinite, Preempted, UsageError
from hubring.ps.core.trace import Trace
from hubring.ps.core.usage import usage
from hubring.ps.job.job import Reason
from hubring.ps.observe import logs
from hubring.ps.transport import registry
from hubring.ps.transport.host import towards
from hubring.workers.communicators.allreduce import AllreduceCommunicator
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.hub import PSCommunicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.communicators.ring_group import ring_store
from hubring.workers.launchers.own_device import choose
from hubring.workers.launchers.placement import Placement, detect
from hubring.workers.runtime import finite
from hubring.workers.runtime.flight import FlightRecorder
from hubring.workers.runtime.record import Record
from hubring.workers.runtime.trainer import Saves, Trainer
from hubring.workers.slowdown import hardship
from hubring.workers.slowdown.delays import Slowness
from hubring.workers.slowdown.hardship import Hardship

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Context:
    """Everything that belongs to this worker between `init` and `shutdown`."""

    config: WorkerConfig
    placement: Placement
    communicator: Communicator
    device: torch.device
    session: Session | None
    record: Record
    place: logs.Place
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
        """Called by the optimizer after each step; the place to learn of the end.

        Raises:
            Preempted: The hub drains, or a signal asked this worker to stop.
        """
        self.completed_steps = self.record.step = self.place.step = step
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
        _save(path.with_stem(f"{path.stem} step{step}"), self.trainers)

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


_current: Context | None = None
_result: dict[str, Any] = {}
_prepared: tuple[WorkerConfig, logs.Place, str] | None = None

Meet = Callable[[WorkerConfig, logs.Place, Placement], Context]
"""Finds a worker its place; the placement is the launcher's."""

_meet: Meet | None = None


def prepare(config: WorkerConfig, place: logs.Place, job: str) -> None:
    """Settles what `init()` in the script will use: called by ps-worker before it runs the script."""
    global _prepared
    _prepared = (config, place, job)


def meet_by(meet: Meet) -> None:
    """Lets `init()` find the others in another way than by a server: how a comparison runs its peers."""
    global _meet
    _meet = meet


def current() -> Context:
    """The context that `init` made.

    Raises:
        UsageError: There is none.
    """
    if _current is None:
        raise UsageError("call hubring.init() first: it finds this worker its place")
    return _current


def started() -> Context | None:
    """The context if there is one."""
    return _current


def result() -> dict[str, Any]:
    """How it went: so far, or until `shutdown`; empty if `init` was never called."""
    return _current.result() if _current is not None else _result


def init(*, aggregate: bool = False) -> Context:
    """Finds this worker its place and builds its communicator; a second call changes nothing.

    Under ps-worker the command line decides; in a plain `python train.py` the
    environment and the TOML file do, and without a server the script trains alone.
    Such a script leaves the job when it ends: as failed after an uncaught exception,
    else as finished, since its exit code cannot be seen from here.

    Args:
        aggregate: The script's own optimizer is to step, on a hub too, as if `--aggregate` were given.

    Raises:
        ServerUnreachable: No server answers at the address.
        ConfigError: Settings, launcher and server contradict each other.
        UsageError: An earlier call left the steps to the hub, and this one wants them here.
    """
    global _current
    if _current is not None:
        if aggregate and _current.communicator.steps_on == "server":
            raise UsageError("init(aggregate=True) came after an init() without it: give it to the first")
        return _current
    if _prepared is not None:
        config, place, job = _prepared
    else:
        config = load_worker({})
        place, job = logs.configure(config.log_format), Path(sys.argv[0]).name
    if aggregate and config.topology == "hub":
        config = replace(config, aggregate=True)
    placement = detect(environment(), config.rank, config.world_size, config.local_rank, socket.gethostname())
    if placement.restart:
        log.info("%s has started this job again: restart %d", placement.launcher, placement.restart)
    _check_folders(config)
    slowness = None if config.hardship is None else hardship.read(config.hardship)
    if _meet is not None:
        _current = _meet(config, place, placement)
    elif config.server is None:
        _current = _alone(config, place, placement)
    else:
        _current = _join(config, place, placement, job)
    _current.job = job
    # Before what may still fail: the session that is there now must be left.
    atexit.register(_leave_at_exit)
    if config.trace is not None:
        session = _current.session
        offset = None if session is None else session.clock_offset()
        trace = Trace(config.trace, f"worker {_current.communicator.rank}", offset)
        _current.recorder = FlightRecorder(trace)
    if slowness is not None:
        _current.emulate(slowness)
    return _current


def shutdown(reason: Reason = Reason.FINISHED, text: str = "") -> None:
    """Leaves the job; the others go on. Without a context, or in a forked child, it does nothing."""
    global _current, _result
    if _current is None or _current.pid != os.getpid():
        return
    atexit.unregister(_leave_at_exit)
    context, _current = _current, None
    try:
        if reason is Reason.FINISHED:
            context.synchronize()
        if reason is Reason.FINISHED and context.saves is not None:
            context.saves.save()
        if reason is Reason.FINISHED and context.communicator.rank == 0 and context.config.save_parameters:
            _save(context.config.save_parameters, context.trainers)
    except BaseException as error:
        reason, text = reason_of(error), _last_line(error)
        raise
    finally:
        _result = context.result()
        context.record.close()
        if context.saves is not None:
            context.saves.close()
        if context.recorder is not None:
            context.recorder.close()
        _give_back(context, reason, text)


def _give_back(context: Context, reason: Reason, text: str) -> None:
    session = context.session
    try:
        # Before the others may step without this worker, in memory that it is shown.
        context.communicator.keep_parameters()
        if session is not None:
            session.leave(reason, text)
        # Before the shards may end: a line to one that has ended would be dialled again.
        context.communicator.close(finished=reason is Reason.FINISHED)
    finally:
        if session is not None:
            session.close()


def _leave_at_exit() -> None:
    """A plain `python train.py` has nobody else to tell the hub that it has ended, and how."""
    worker = _current
    if worker is None or worker.pid != os.getpid():
        return
    error = getattr(sys, "last_value", None)  # what Python has just printed as the reason for the end
    stopped = worker.communicator.draining or (worker.session is not None and worker.session.stop_after > 0)
    if isinstance(error, KeyboardInterrupt) or stopped:
        shutdown(Reason.PREEMPTED)
    elif error is None:
        shutdown()
    else:
        shutdown(reason_of(error), _last_line(error))
    if error is not None and worker.communicator.topology == "ring":
        # A broken ring leaves threads inside torch that abort a process which ends in good order.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def reason_of(error: BaseException) -> Reason:
    """Why a worker leaves that ends with this."""
    return Reason.DIVERGED if isinstance(error, NonFinite) else Reason.FAILED


def _last_line(error: BaseException) -> str:
    return str(error) if isinstance(error, HubringError) else format_exception_only(error)[-1].strip()


def _check_folders(config: WorkerConfig) -> None:
    """Better now than when there is something to write."""
    for flag, path in (("--record", config.record), ("--save-parameters", config.save_parameters)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it first")


def _alone(config: WorkerConfig, place: logs.Place, placement: Placement) -> Context:
    if placement.size is not None and placement.size > 1:
        raise ConfigError(
            f"{placement.launcher} started {placement.size} workers, but no server is named:"
            " give --server HOST:PORT (or PS_SERVER); ps-server start prints it"
        )
    log.info("no server named: training alone in this process")
    if config.compress:
        log.info("--compress %s: a lone worker exchanges nothing, so nothing is compressed", config.compress)
    place.role = "w0"
    device = torch.device("cpu")
    return Context(config, placement, LocalCommunicator(), device, None, Record(config.record), place)


def _join(config: WorkerConfig, place: logs.Place, placement: Placement, job: str) -> Context:
    assert config.server is not None
    # What can fail by itself comes before the others are told of this worker.
    device, record = _device(config, placement), Record(config.record)
    session = Session(
        config.server,
        job=job,
        topology=config.topology,
        rank=placement.rank,
        world_size=placement.size,
        start_timeout=config.timeout,
        log_format=config.log_format,
        trace=str(config.trace or ""),
    )
    place.role = f"w{session.sender.rank}"
    _share_cores(session.neighbours)
    try:
        make = _ring if config.topology == "ring" else _hub
        communicator = make(config, session, device)
        communicator.waiting = session.waiting
    except BaseException as error:
        session.leave(Reason.FAILED, str(error))
        session.close()
        raise
    return Context(config, placement, communicator, device, session, record, place)


def _share_cores(workers: int) -> None:
    """Gives torch this worker's part of the host's cores: workers that take all of them stall one another."""
    # A shard beside a worker gets no share of its own: the two mostly take turns. Measured with one of
    # each on 2 cores, an MLP of 25 M parameters: 128 ms a step with both cores to the worker, 152 with one.
    if "OMP_NUM_THREADS" not in environment():
        share = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(min(share, torch.get_num_threads()))  # a script may have taken fewer already


def _hub(config: WorkerConfig, session: Session, device: torch.device) -> Communicator:
    transport, dial, wired = registry.choose(session.shards, config.transport)
    log.info(
        "rank %d of %d, hub in mode %s, %d shard(s) by %s",
        session.sender.rank,
        session.size,
        session.mode,
        len(session.shards),
        transport.name,
    )
    # Only who is waited for can be ahead, and only a link makes those behind pay for it.
    client = KVClient(session.sender, len(session.shards), dial, bounded=session.lockstep and wired)
    try:
        client.wait_connected(config.timeout)
    except BaseException:
        client.close()
        raise
    return PSCommunicator(
        session,
        client,
        transport,
        wired=wired,
        aggregate=config.aggregate,
        timeout=config.timeout,
        compress=config.compress or "",
    )


def _ring(config: WorkerConfig, session: Session, device: torch.device) -> Communicator:
    server, _ = address(session.address)
    store = ring_store(
        session.sender.rank,
        server if is_loopback(server) else towards(server),  # needs no way to anywhere else
        lambda where: session.publish("ring", where),
        lambda: session.lookup("ring", config.timeout),
        config.timeout,
    )
    log.info("rank %d of %d, ring by %s", session.sender.rank, session.size, config.backend)
    communicator = AllreduceCommunicator(
        session.sender.rank,
        session.size,
        store,
        backend=config.backend,
        device=device,
        timeout=config.timeout,
        compress=config.compress or "",
    )
    session.on_failure(communicator.fail)
    return communicator


def _device(config: WorkerConfig, placement: Placement) -> torch.device:
    device = torch.device(choose(config.backend, placement, environment()).device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _save(path: Path, trainers: list[Trainer]) -> None:
    from safetensors.torch import save_file

    tensors = {
        name: parameter.detach().cpu().clone().contiguous()
        for trainer in trainers
        for name, parameter in trainer.named_parameters.items()
    }
    save_file(tensors, path)


def unwatched(_: int) -> None:
    """What a step begins with that nobody slows down."""
