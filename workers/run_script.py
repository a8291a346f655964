"""Runs one training script in this process, and tells how it ended."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import runpy
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hubring.ps.config import terminal
from hubring.ps.config.environment import environment
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import Fenced, HubringError, Preempted, RingBroken, ServerUnreachable, UsageError
from hubring.ps.core.shadowed_packages import hidden_by
from hubring.ps.job.job import Reason
from hubring.ps.observe.logs import LogOrigin
from hubring.workers.horovod import alias
from hubring.workers.launchers.placement import detect
from hubring.workers.runtime import context
from hubring.workers.runtime.worker import Worker

log = logging.getLogger(__name__)

INTERRUPTED = 128 + signal.SIGINT


@dataclass(slots=True)
class Outcome:
    """How the script ended: exit code, the worker's result, and what to tell a person."""

    code: int
    result: dict[str, Any]
    error: str = ""
    traceback: str = ""
    stuck: bool = False
    """Threads of a broken ring are left that only the end of the process frees."""


def train(config: WorkerConfig, origin: LogOrigin, module: str, job: str, words: list[str]) -> Outcome:
    """Runs the script that `words` begin with, or else the built-in job with `words` as its arguments.

    Raises:
        UsageError: There is no such script, or a file beside it hides a package that we need.
    """
    if words and not words[0].startswith("-"):
        script = Path(words[0])
        if not script.is_file():
            raise UsageError(f"no script {script}: name a file, or give a job's arguments behind --")
        if _searched(environment()) and (hidden := hidden_by(script.resolve().parent)):
            raise UsageError(hidden)
        context.prepare(config, origin, script.name)
        if config.as_horovod:
            alias.install()
            alias.tell_place(detect(environment(), config.rank, config.world_size, config.local_rank))
        return _warned(_watched(lambda: _run_script(script, words[1:])), config)
    # The built-in jobs must be told the same everywhere; what a script is told is its own affair.
    context.prepare(config, origin, " ".join([job, *words]))
    return _watched(lambda: importlib.import_module(module).main(words))


def _searched(variables: Mapping[str, str]) -> bool:
    """Whether the script's folder is searched for modules: Python leaves it out where the user says so."""
    return not variables.get("PYTHONSAFEPATH")


def _run_script(script: Path, arguments: list[str]) -> None:
    """As `python script arguments` would."""
    sys.argv = [str(script), *arguments]
    if _searched(environment()):
        if not sys.flags.safe_path:
            del sys.path[0]  # the folder of our own program
        sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def _watched(action: Callable[[], object]) -> Outcome:
    """Runs the script; whatever happens, the worker leaves the job and says why."""
    _heed_signals()
    outcome, reason = Outcome(0, {}), Reason.FINISHED
    try:
        _to_the_end(action)
        terminal.ignore_stop_signals()
        context.shutdown()
    except Preempted as stop:
        outcome, reason = Outcome(_code(stop), {}), Reason.PREEMPTED
        log.info("%s", stop.text)
    except SystemExit as end:
        text = end.code if isinstance(end.code, str) else f"the script exited with {_code(end)}"
        outcome = Outcome(_code(end), {}, error=text)
        reason = Reason.FAILED
    except KeyboardInterrupt:
        outcome, reason = Outcome(INTERRUPTED, {}, error="interrupted"), Reason.PREEMPTED
    except HubringError as error:
        cause = _cause(error)
        outcome = Outcome(cause.exit_code, {}, error=f"{cause}{_where(error)}")
        reason = context.reason_of(cause)
    except BaseException as error:
        outcome, reason = _failed(error)
    return _leave(outcome, reason)


def _where(error: BaseException) -> str:
    """The line of the script that met the error, if one did."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == sys.argv[0]]
    return f" ({Path(sys.argv[0]).name} line {lines[-1]})" if lines else ""


def _failed(error: BaseException) -> tuple[Outcome, Reason]:
    worker = context.started()
    last = traceback.format_exception_only(error)[-1].strip()
    if worker is not None and worker.stop_code is not None:
        # The signal went to the script's own processes too, and it fails by their end.
        return Outcome(
            worker.stop_code, {}, error=f"stopped on request, before its step: {last}"
        ), Reason.PREEMPTED
    hint = _as_horovod(error) or _shared_memory(error)
    return Outcome(1, {}, error=f"{last}{hint}", traceback=_traceback(error)), Reason.FAILED


def _as_horovod(error: BaseException) -> str:
    """What runs a script that was written for Horovod, which is not installed."""
    wanted = isinstance(error, ModuleNotFoundError) and error.name == "horovod"
    return ": ps-worker --as-horovod SCRIPT runs it as it is" if wanted else ""


def _shared_memory(error: BaseException) -> str:
    """How much a DataLoader's processes have to hand batches over in, where that may be why one failed."""
    if not isinstance(error, RuntimeError) or "shared memory" not in str(error):
        return ""
    room = shutil.disk_usage("/dev/shm")  # noqa: S108 - where torch puts batches
    return (
        f" (/dev/shm holds {room.total} bytes, {room.free} bytes are free: give the container more,"
        " as by --shm-size=1g, or the DataLoader num_workers=0)"
    )


def _to_the_end(action: Callable[[], object]) -> None:
    """`sys.exit(0)` ends a script as well as its last line does."""
    try:
        action()
    except SystemExit as end:
        if _code(end):
            raise


def _cause(error: HubringError) -> HubringError:
    """Who broke the ring, took a shard along, or lost its place and why, is the server's to say."""
    worker = context.started()
    if worker is None or worker.session is None:
        return error
    lost_shard = worker.session.serves and isinstance(error, ServerUnreachable)
    if isinstance(error, RingBroken | Fenced) or lost_shard:
        return worker.session.verdict() or error
    return error


def _leave(outcome: Outcome, reason: Reason) -> Outcome:
    with contextlib.suppress(KeyboardInterrupt, Preempted):  # once more quits, whoever needs our shard
        context.shutdown(reason, outcome.error)
    outcome.result = context.result()
    outcome.stuck = outcome.code != 0 and outcome.result.get("topology") == "ring"
    return outcome


def _warned(outcome: Outcome, config: WorkerConfig) -> Outcome:
    if config.server is not None and not outcome.result and outcome.code == 0:
        log.warning("the script never called hubring.init(): %s was not asked for anything", config.server)
    return outcome


def _traceback(error: BaseException) -> str:
    """As the script alone would have printed it: our frames and runpy's left out."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename) and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_ours(filename: str) -> bool:
    return filename in (__file__, runpy.__file__) or filename.startswith("<frozen")


def _code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1


def _heed_signals() -> None:
    """The first signal ends the worker after its step; the second one at once.

    A scheduler's second one asks for what the first did, often through the launcher as well, which
    passes on what everybody got: then only Ctrl-C counts.
    """
    asked = Preempted.exit_code
    codes = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: asked, signal.SIGUSR1: asked}

    def heed(number: int, frame: FrameType | None) -> None:
        worker = context.started()
        forked = worker is not None and worker.pid != os.getpid()
        if forked and number == signal.SIGTERM:  # how multiprocessing ends its children
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if forked and number == signal.SIGUSR1:
            return
        if worker is not None and worker.stop_code is not None and _repeats(worker, number):
            return
        if worker is None or not worker.trainers or worker.stop_code is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise Preempted("stopped on request, at once")
        worker.stop_code, worker.notice = codes[signal.Signals(number)], number == signal.SIGUSR1
        if not forked:  # else Ctrl-C reached a DataLoader's process too, which the worker still needs
            what = "all workers leave after a common step" if worker.stops_all else "leaving after this step"
            quits = "Ctrl-C" if _repeats(worker, number) else "once more"
            log.warning("%s: %s; %s quits", signal.Signals(number).name, what, quits)

    for number in codes:
        signal.signal(number, heed)


def _repeats(worker: Worker, number: int) -> bool:
    """Whether another such signal is no second wish."""
    return number == signal.SIGUSR1 or (
        number == signal.SIGTERM and (worker.notice or worker.placement.ends_together)
    )
