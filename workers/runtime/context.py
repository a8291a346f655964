"""The worker of this process, from `init` to `shutdown`."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import weakref
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
from hubring.ps.core.packages import TESTED_TORCH, untested_torch
from hubring.ps.core.standard_streams import flush_outputs
from hubring.ps.core.trace import Trace
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.observe import logs
from hubring.ps.security.certificate import load_certificate
from hubring.workers.launchers.placement import Placement, detect
from hubring.workers.runtime import slowdown, topology
from hubring.workers.runtime.conditions import ConditionWatch
from hubring.workers.runtime.metric_export import in_any_folder, require_writer
from hubring.workers.runtime.training_record import (
    FlightRecorder,
    Record,
    look_for_lone_training,
    look_for_nan,
)
from hubring.workers.runtime.worker import Worker, save_parameters

log = logging.getLogger(__name__)


_current: Worker | None = None
_result: dict[str, Any] = {}
_prepared: tuple[WorkerConfig, logs.LogOrigin, str] | None = None
_watch: ConditionWatch | None = None
_placement: Placement | None = None
"""This worker's place, if it is not that of the launcher."""

WorkerMaker = Callable[[WorkerConfig, logs.LogOrigin, Placement], Worker]
"""Makes the worker; the placement is the launcher's."""

_meet: WorkerMaker | None = None


def prepare(
    config: WorkerConfig, origin: logs.LogOrigin, job: str, placement: Placement | None = None
) -> None:
    """Sets the configuration for `init()`. ps-worker calls it before the script, which may `chdir`.

    Without a placement, `init()` reads that of the launcher.
    """
    global _prepared, _placement, _watch
    _prepared, _placement = (_anchored(config), origin, job), placement
    _watch = None if config.audit is None else ConditionWatch()


def is_prepared() -> bool:
    """Returns whether a launcher of Hubring's has set the configuration."""
    return _prepared is not None and _placement is None


def _anchored(config: WorkerConfig) -> WorkerConfig:
    """Returns settings whose paths hold in any folder."""
    paths = ((name, getattr(config, name)) for name in config.__struct_fields__)
    absolute = {name: path.absolute() for name, path in paths if isinstance(path, Path)}
    return replace(config, **absolute, report_to=in_any_folder(config.report_to))


def make_workers_by(meet: WorkerMaker) -> None:
    """Makes `init()` create workers with `meet`, without a server. A comparison uses it for its peers."""
    global _meet
    _meet = meet


def current() -> Worker:
    """Returns the worker that `init` made.

    Raises:
        UsageError: `init` was not called.
    """
    if _current is None:
        raise UsageError("no worker in this process: call hubring.init() first")
    return _current


def count_step(optimizer: object, *_: object) -> None:
    """Counts a step of an optimizer of the script, to be shown; of several, only the first one's steps.

    Not where an optimizer of Hubring counts. A signal to stop need not wait for the end of such a step.
    """
    worker = _current
    if worker is None or worker.trainers:
        return
    if worker.counted() is None:  # its memory is the script's to free
        worker.counted = weakref.ref(optimizer)
        worker.record.begin()
    if optimizer is worker.counted():
        worker.completed_steps += 1
        worker.record.step = worker.origin.step = worker.completed_steps
        if worker.session is not None:
            worker.session.step = worker.completed_steps


def started() -> Worker | None:
    """Returns the worker, or None before `init` and after `shutdown`."""
    return _current


def result() -> dict[str, Any]:
    """Returns the worker's result so far, or at `shutdown`. It is empty if `init` was not called."""
    return _current.result() if _current is not None else _result


def init(*, aggregate: bool = False) -> Worker:
    """Joins the job and builds the communicator. A second call changes nothing.

    Under ps-worker the command line sets the configuration. A plain `python train.py` reads
    environment variables and the TOML file; without a server it trains alone. Such a script
    leaves the job when the process exits: as failed after an uncaught exception, otherwise as
    finished, because an exit handler cannot see the exit code.

    Args:
        aggregate: The script's own optimizer steps, on a hub too, as with `--aggregate`.

    Raises:
        ServerUnreachable: No server answers at the address.
        ConfigError: Settings, launcher and server contradict each other.
        UsageError: An earlier call without `aggregate` let the hub step, and this call sets it.
    """
    global _current
    if _current is not None:
        if aggregate and _current.communicator.steps_on == "server":
            raise UsageError(
                "hubring.init(aggregate=True) was called after hubring.init():"
                " pass aggregate=True to the first call"
            )
        return _current
    placement = _placement
    if _prepared is not None:
        config, origin, job = _prepared
    else:
        config = _anchored(load_worker({}))
        origin, job = logs.configure(config.log_format, logger=logs.OURS), Path(sys.argv[0]).name
    if aggregate and config.topology == "hub":
        config = replace(config, aggregate=True)
    if placement is None:
        numbers = config.rank, config.world_size, config.local_rank
        placement = detect(environment(), *numbers, socket.gethostname())
    if placement.restart:
        log.info("%s restarted this job: restart %d", placement.launcher, placement.restart)
    _check_folders(config)
    require_writer(config.report_to)
    slowness = None if config.hardship is None else slowdown.read_slowdown(config.hardship)
    if _meet is not None:
        _current = _meet(config, origin, placement)
    elif config.server is None:
        _current = _alone(config, origin, placement)
    else:
        _current = _join(config, origin, placement, job)
    _current.job = job
    if _current.communicator.rank == 0 and (newer := untested_torch(torch.__version__)):
        log.warning("%s; if something fails: %s", newer, TESTED_TORCH)
    # The calls below can fail; the worker must leave its session then too.
    atexit.register(_leave_at_exit)
    if config.trace is not None:
        session = _current.session
        offset = None if session is None else session.clock_offset()
        trace = Trace(config.trace, f"worker {_current.communicator.rank}", offset)
        _current.recorder = FlightRecorder(trace)
    if slowness is not None:
        _current.emulate(slowness)
    if config.audit is not None:
        from hubring.workers.audit.audit import Audit

        _current.audit = Audit(config.audit, _current.communicator)
        _current.conditions = _watch
    return _current


def shutdown(reason: LeaveReason = LeaveReason.FINISHED, text: str = "") -> None:
    """Leaves the job. Does nothing without a worker or in a forked child.

    A worker that finished waits until its job is over: its exit code is then that of the job.

    Raises:
        HubringError: This worker finished, but its last step or the job failed, the last checkpoint was not
            written, or the server did not report how the job ended.
    """
    global _current, _result, _prepared, _placement
    if _current is None or _current.pid != os.getpid():
        return
    atexit.unregister(_leave_at_exit)
    worker, _current = _current, None
    if _placement is not None:  # `prepare` was for this job only
        _prepared = _placement = None
    try:
        if reason is LeaveReason.FINISHED:
            worker.synchronize()
            if worker.saves is not None:
                worker.saves.save()
            elif not worker.warned_of_nan:
                look_for_nan(worker.trainers, worker.communicator, worker.completed_steps)
            look_for_lone_training(worker.trainers, worker.communicator)
            if worker.communicator.rank == 0 and worker.config.save_parameters:
                save_parameters(worker.config.save_parameters, worker.trainers)
    except BaseException as error:
        reason, text = reason_of(error), _last_line(error)
        raise
    finally:
        _result = worker.result()
        for part in (worker.record, worker.audit, worker.conditions, worker.saves, worker.recorder):
            if part is not None:
                part.close()
        try:
            _leave(worker, reason, text)
        finally:  # last: W&B's server may take minutes, and the other workers need to know
            if worker.export is not None and worker.communicator.rank == 0:
                worker.export.close(finished=reason is LeaveReason.FINISHED)


def _leave(worker: Worker, reason: LeaveReason, text: str) -> None:
    session = worker.session
    try:
        # Before the worker leaves: the other workers then step without it, in the memory that it reads.
        if worker.communicator.stepping_hub is not None:
            worker.communicator.stepping_hub.keep_parameters()
        try:
            if session is not None:
                session.leave(reason, text)
        finally:
            # Before the shards can exit: the client reconnects to a shard that it loses.
            worker.communicator.close(finished=reason is LeaveReason.FINISHED)
        if session is not None:
            session.await_end()
    finally:
        if session is not None:
            session.close()


def _leave_at_exit() -> None:
    """Leaves the job at the end of a plain `python train.py`, where no ps-worker does it."""
    worker = _current
    if worker is None or worker.pid != os.getpid():
        return
    error = getattr(sys, "last_value", None)  # the uncaught exception, which Python has printed by now
    stopped = worker.communicator.draining or (worker.session is not None and worker.session.stop_after > 0)
    if isinstance(error, KeyboardInterrupt) or stopped:
        shutdown(LeaveReason.PREEMPTED)
    elif error is None:
        _finish_at_exit()
    else:
        shutdown(reason_of(error), _last_line(error))
    if error is not None and worker.communicator.topology == "ring":
        # After a broken ring, threads inside torch abort the process on a normal exit.
        flush_outputs()
        os._exit(1)


def _finish_at_exit() -> None:
    """Leaves the job. An error ends the process here, because one in an exit handler changes no exit code."""
    try:
        shutdown()
    except HubringError as error:
        log.error("%s", error)
        flush_outputs()
        os._exit(error.exit_code)


def reason_of(error: BaseException) -> LeaveReason:
    """Returns the reason for leaving the job after this error."""
    if isinstance(error, NonFinite):
        return LeaveReason.DIVERGED
    worker = started()  # before its first step others need not end with it: it may be a late one
    refused = isinstance(error, ConfigError) and worker is not None and worker.completed_steps
    return LeaveReason.REFUSED if refused else LeaveReason.FAILED


def _last_line(error: BaseException) -> str:
    return str(error) if isinstance(error, HubringError) else format_exception_only(error)[-1].strip()


def _check_folders(config: WorkerConfig) -> None:
    """Raises ConfigError before training if a file's folder is missing."""
    files = {"--record": config.record, "--save-parameters": config.save_parameters, "--audit": config.audit}
    for flag, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: folder {path.parent} does not exist; create it first")


def _alone(config: WorkerConfig, origin: logs.LogOrigin, placement: Placement) -> Worker:
    communicator = topology.alone(config, placement)
    device = topology.own_device(config, placement)
    origin.role = "w0"
    return Worker(config, placement, communicator, device, None, Record(config.record), origin)


def _join(config: WorkerConfig, origin: logs.LogOrigin, placement: Placement, job: str) -> Worker:
    assert config.server is not None
    # These two can fail, so they come before the other workers see this one.
    device, record = topology.own_device(config, placement), Record(config.record)
    session = Session(
        config.server,
        job=job,
        topology=config.topology,
        rank=placement.rank,
        world_size=placement.size,
        start_timeout=config.timeout,
        log_format=config.log_format,
        token_file=config.token_file,
        own=load_certificate(config.tls, serves=False),
        insecure=config.insecure,
        trace=str(config.trace or ""),
        min_workers=config.min_workers or 0,
        local=config.local,
    )
    origin.role = f"w{session.sender.rank}"
    topology.note_shared_gpu(device, placement, session.neighbours)
    try:
        communicator = topology.connect(config, session, device)
    except BaseException as error:
        session.leave(LeaveReason.FAILED, str(error))
        session.await_end()
        session.close()
        raise
    return Worker(config, placement, communicator, device, session, record, origin)
