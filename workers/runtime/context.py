"""The worker that this process is: found a place by `init`, gone after `shutdown`."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception_only
from typing import Any

import torch
from msgspec.structs import replace

from hubring.ps.client.session import Session
from hubring.ps.config.environment import environment
from hubring.ps.config.sources import load_worker
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError, HubringError, NonFinite, UsageError
from hubring.ps.core.trace import Trace
from hubring.ps.job.job import Reason
from hubring.ps.observe import logs
from hubring.workers.launchers.placement import Placement, detect
from hubring.workers.runtime import topology
from hubring.workers.runtime.in_flight import FlightRecorder
from hubring.workers.runtime.record import Record
from hubring.workers.runtime.worker import Worker, save_parameters
from hubring.workers.slowdown import hardship

log = logging.getLogger(__name__)


_current: Worker | None = None
_result: dict[str, Any] = {}
_prepared: tuple[WorkerConfig, logs.LogOrigin, str] | None = None

Meet = Callable[[WorkerConfig, logs.LogOrigin, Placement], Worker]
"""Finds a worker its place; the placement is the launcher's."""

_meet: Meet | None = None


def prepare(config: WorkerConfig, origin: logs.LogOrigin, job: str) -> None:
    """Settles what `init()` in the script will use: called by ps-worker before it runs the script."""
    global _prepared
    _prepared = (config, origin, job)


def meet_by(meet: Meet) -> None:
    """Lets `init()` find the others in another way than by a server: how a comparison runs its peers."""
    global _meet
    _meet = meet


def current() -> Worker:
    """The worker that `init` made.

    Raises:
        UsageError: There is none.
    """
    if _current is None:
        raise UsageError("call hubring.init() first: it finds this worker its place")
    return _current


def started() -> Worker | None:
    """The worker if there is one."""
    return _current


def result() -> dict[str, Any]:
    """How it went: so far, or until `shutdown`; empty if `init` was never called."""
    return _current.result() if _current is not None else _result


def init(*, aggregate: bool = False) -> Worker:
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
        config, origin, job = _prepared
    else:
        config = load_worker({})
        origin, job = logs.configure(config.log_format), Path(sys.argv[0]).name
    if aggregate and config.topology == "hub":
        config = replace(config, aggregate=True)
    placement = detect(environment(), config.rank, config.world_size, config.local_rank, socket.gethostname())
    if placement.restart:
        log.info("%s has started this job again: restart %d", placement.launcher, placement.restart)
    _check_folders(config)
    slowness = None if config.hardship is None else hardship.read(config.hardship)
    if _meet is not None:
        _current = _meet(config, origin, placement)
    elif config.server is None:
        _current = _alone(config, origin, placement)
    else:
        _current = _join(config, origin, placement, job)
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
    """Leaves the job; the others go on. Without a worker, or in a forked child, it does nothing."""
    global _current, _result
    if _current is None or _current.pid != os.getpid():
        return
    atexit.unregister(_leave_at_exit)
    worker, _current = _current, None
    try:
        if reason is Reason.FINISHED:
            worker.synchronize()
        if reason is Reason.FINISHED and worker.saves is not None:
            worker.saves.save()
        if reason is Reason.FINISHED and worker.communicator.rank == 0 and worker.config.save_parameters:
            save_parameters(worker.config.save_parameters, worker.trainers)
    except BaseException as error:
        reason, text = reason_of(error), _last_line(error)
        raise
    finally:
        _result = worker.result()
        worker.record.close()
        if worker.saves is not None:
            worker.saves.close()
        if worker.recorder is not None:
            worker.recorder.close()
        _give_back(worker, reason, text)


def _give_back(worker: Worker, reason: Reason, text: str) -> None:
    session = worker.session
    try:
        # Before the others may step without this worker, in memory that it is shown.
        worker.communicator.keep_parameters()
        if session is not None:
            session.leave(reason, text)
        # Before the shards may end: a line to one that has ended would be dialled again.
        worker.communicator.close(finished=reason is Reason.FINISHED)
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


def _alone(config: WorkerConfig, origin: logs.LogOrigin, placement: Placement) -> Worker:
    communicator = topology.alone(config, placement)
    origin.role = "w0"
    return Worker(config, placement, communicator, torch.device("cpu"), None, Record(config.record), origin)


def _join(config: WorkerConfig, origin: logs.LogOrigin, placement: Placement, job: str) -> Worker:
    assert config.server is not None
    # What can fail by itself comes before the others are told of this worker.
    device, record = topology.own_device(config, placement), Record(config.record)
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
    origin.role = f"w{session.sender.rank}"
    try:
        communicator = topology.connect(config, session, device)
    except BaseException as error:
        session.leave(Reason.FAILED, str(error))
        session.close()
        raise
    return Worker(config, placement, communicator, device, session, record, origin)
