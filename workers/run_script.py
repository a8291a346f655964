"""Runs one training script in this process and reports the outcome."""

from __future__ import annotations

import contextlib
import importlib
import logging
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hubring.ps.config import terminal
from hubring.ps.config.environment import environment
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import Fenced, HubringError, Preempted, RingBroken, ServerUnreachable, UsageError
from hubring.ps.core.extras import EXTRAS, how_to_install, require_for_job
from hubring.ps.job.job import Reason
from hubring.ps.observe.logs import LogOrigin
from hubring.workers.horovod import alias
from hubring.workers.horovod.errors import HorovodInternalError
from hubring.workers.launchers.placement import detect
from hubring.workers.runtime import context
from hubring.workers.script import Script
from hubring.workers.stop_signals import INTERRUPTED, StopSignals

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """How the script ended: the exit code, the worker's result, and the error to print."""

    code: int
    result: dict[str, Any]
    error: str = ""
    traceback: str = ""
    hint: str = ""
    """The end of `error` that the traceback does not contain."""
    stuck: bool = False
    """A broken ring left threads that end only with the process."""

    def text(self, program: str) -> str:
        """Returns the lines for standard error. A traceback already contains the error message."""
        line = self.hint if self.traceback else self.error
        return self.traceback + (f"{program}: {line}\n" if line else "")


def train(
    config: WorkerConfig,
    origin: LogOrigin,
    module: str,
    job: str,
    words: list[str],
    *,
    is_module: bool = False,
) -> Outcome:
    """Runs a script or a built-in job.

    Args:
        config: Settings of this worker.
        origin: Prefix of this worker's log lines.
        module: Module of the built-in job.
        job: Name of the built-in job.
        words: The script and its arguments. If the first word is missing or is an option, the built-in
            job runs with `words` as its arguments.
        is_module: Whether the first word is a module, as for `python -m`.

    Raises:
        UsageError: The script or the module does not exist, or a file beside it hides a package that
            Hubring needs.
        ConfigError: The built-in job needs a package that is not installed.
    """
    if words and not words[0].startswith("-"):
        script = Script(words[0], is_module)
        script.check()
        context.prepare(config, origin, script.name)
        if config.as_horovod:
            alias.install()
            alias.tell_place(detect(environment(), config.rank, config.world_size, config.local_rank))
        return _warn_unused_server(_run(lambda: script.run(words[1:])), config)
    if is_module:
        raise UsageError("--module: the module is missing; for example: ps-worker -m package.train [ARGS]...")
    require_for_job(job)
    # All ranks must pass the same arguments to a built-in job, so they are part of the job's name.
    context.prepare(config, origin, " ".join([job, *words]))
    return _run(lambda: importlib.import_module(module).main(words))


def _run(action: Callable[[], object]) -> Outcome:
    """Runs the script. In every case the worker leaves the job and sends the reason."""
    StopSignals().install()
    outcome, reason, line = Outcome(0, {}), Reason.FINISHED, ""
    try:
        _call(action)
        terminal.ignore_stop_signals()
        context.shutdown()
    except Preempted as stop:
        outcome, reason = Outcome(_exit_code(stop), {}), Reason.PREEMPTED
        log.info("%s", stop.text)
    except SystemExit as end:
        text = end.code if isinstance(end.code, str) else f"the script exited with {_exit_code(end)}"
        outcome = Outcome(_exit_code(end), {}, error=text)
        reason = Reason.FAILED
    except KeyboardInterrupt:
        outcome, reason = Outcome(INTERRUPTED, {}, error="interrupted"), Reason.PREEMPTED
    except BaseException as error:
        if (own := _own(error)) is None:
            outcome, reason = _failed(error)
        else:
            cause = _server_cause(own)
            outcome = Outcome(cause.exit_code, {}, error=str(cause))
            reason, line = context.reason_of(cause), _script_line(error)
    _leave(outcome, reason)
    # Added last: the other workers receive the message without it, and each adds its own line.
    outcome.error += line
    return outcome


def _script_line(error: BaseException) -> str:
    """Returns the script's line in the error's traceback, or an empty string."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == sys.argv[0]]
    return f" ({Path(sys.argv[0]).name} line {lines[-1]})" if lines else ""


def _failed(error: BaseException) -> tuple[Outcome, Reason]:
    worker = context.started()
    last = traceback.format_exception_only(error)[-1].strip()
    if worker is not None and worker.stop_code is not None:
        # The signal also stopped the script's own child processes, and their exit made the script fail.
        return Outcome(
            worker.stop_code, {}, error=f"stopped on request, before the step finished: {last}"
        ), Reason.PREEMPTED
    hint = _horovod_hint(error) or _missing_package_hint(error) or _shared_memory_hint(error)
    text = f"{last}: {hint}" if hint else last
    return Outcome(1, {}, error=text, traceback=_traceback(error), hint=hint), Reason.FAILED


def _horovod_hint(error: BaseException) -> str:
    """Returns a hint for a script that imports Horovod where Horovod is not installed."""
    wanted = isinstance(error, ModuleNotFoundError) and error.name == "horovod"
    return "to run the script unchanged, use ps-worker --as-horovod SCRIPT" if wanted else ""


def _missing_package_hint(error: BaseException) -> str:
    """Returns how to install an optional package that the script imports."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return how_to_install(error.name)
    return ""


def _shared_memory_hint(error: BaseException) -> str:
    """Returns the size of /dev/shm if a DataLoader process may have failed because it is too small."""
    if not isinstance(error, RuntimeError) or "shared memory" not in str(error):
        return ""
    room = shutil.disk_usage("/dev/shm")  # noqa: S108 - where torch puts batches
    return (
        f"no room: /dev/shm has {room.total} bytes, {room.free} bytes are free: start the container with more"
        " shared memory, for example --shm-size=1g, or set num_workers=0 in the DataLoader"
    )


def _call(action: Callable[[], object]) -> None:
    """Runs the script. `sys.exit(0)` counts as a normal end."""
    try:
        action()
    except SystemExit as end:
        if _exit_code(end):
            raise


def _own(error: BaseException) -> HubringError | None:
    """Returns the error if it is one of ours, also under the name that Horovod's users catch."""
    own = error.__cause__ if isinstance(error, HorovodInternalError) else error
    return own if isinstance(own, HubringError) else None


def _server_cause(error: HubringError) -> HubringError:
    """Returns the server's explanation of a broken ring, a lost shard or an expired lease, if it has one."""
    worker = context.started()
    if worker is None or worker.session is None:
        return error
    lost_shard = worker.session.serves and isinstance(error, ServerUnreachable)
    broken_ring = isinstance(error, RingBroken) and not worker.communicator.heals
    if broken_ring or isinstance(error, Fenced) or lost_shard:
        return worker.session.verdict() or error
    return error


def _leave(outcome: Outcome, reason: Reason) -> None:
    # A second signal quits at once, even while other workers still need this worker's shard.
    with contextlib.suppress(KeyboardInterrupt, Preempted):
        context.shutdown(reason, outcome.error)
    outcome.result = context.result()
    outcome.stuck = outcome.code != 0 and outcome.result.get("topology") == "ring"


def _warn_unused_server(outcome: Outcome, config: WorkerConfig) -> Outcome:
    if config.server is not None and not outcome.result and outcome.code == 0:
        log.warning("the script did not call hubring.init(): it did not join the job at %s", config.server)
    return outcome


def _traceback(error: BaseException) -> str:
    """Returns the traceback without the frames of this file and of runpy."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename) and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_ours(filename: str) -> bool:
    return filename in (__file__, runpy.__file__) or filename.startswith("<frozen")


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1
