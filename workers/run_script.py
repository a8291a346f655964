"""Runs one training script or module in this process, as `python` runs it, and reports the outcome."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import runpy
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any
from zipfile import is_zipfile

from hubring.ps.config import terminal
from hubring.ps.config.environment import environment, export
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import Fenced, HubringError, Preempted, RingBroken, ServerUnreachable, UsageError
from hubring.ps.core.packages import EXTRAS, hidden_by, how_to_install, require_for_job
from hubring.ps.core.standard_streams import outputs_restored
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.observe.logs import LogOrigin
from hubring.ps.process.launch import module_exists
from hubring.workers.horovod import alias
from hubring.workers.horovod.errors import HorovodInternalError
from hubring.workers.launchers.known_launchers import LAUNCHER_VARIABLE
from hubring.workers.launchers.placement import detect
from hubring.workers.runtime import context
from hubring.workers.runtime.script_groups import (
    export_place,
    gloo_answered,
    no_lightning_group,
    process_group_hint,
)
from hubring.workers.runtime.stop_signals import INTERRUPTED, StopSignals


class Script:
    """A script, or a module as for `python -m`.

    Args:
        name: The script's path, or the module's dotted name.
        is_module: Which of the two `name` is.
    """

    def __init__(self, name: str, is_module: bool) -> None:
        self._given, self._is_module = name, is_module
        self.name = name if is_module else Path(name).name
        """The name of the job."""
        self.file = "" if is_module else os.path.abspath(name)
        """The path of the program that runs; empty before a module runs."""
        self._folder = Path.cwd() if is_module else Path(name).resolve().parent

    def check(self) -> None:
        """Checks that the script can run.

        Raises:
            UsageError: The script does not exist, or a file beside it hides a package that Hubring needs.
        """
        if self._is_module and not module_exists(self._given):
            raise UsageError(f"module {self._given} not found in {self._folder} or in {sys.prefix}")
        if not self._is_module and not Path(self._given).is_file():
            raise UsageError(
                f"script {self._given} not found: pass an existing file, or job arguments after --"
            )
        if _searches_folder() and (hidden := hidden_by(self._folder)):
            raise UsageError(hidden)

    def run(self, arguments: list[str]) -> None:
        """Runs the script as `python script arguments` or `python -m module arguments` does."""
        if _searches_folder():
            if not sys.flags.safe_path:
                del sys.path[0]  # the folder of our own program
            sys.path.insert(0, str(self._folder))
        if self._is_module:
            self.file = _file_of(self._given)
            sys.argv = [self.file, *arguments]
            runpy.run_module(self._given, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [self._given, *arguments]
            _run_file(self.file)

    def line(self, error: BaseException) -> str:
        """Returns the script's line in the error's traceback, or an empty string."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self.file]
        return f" ({Path(self.file).name} line {lines[-1]})" if lines else ""


def _run_file(path: str) -> None:
    """Runs a file as Python does: the module that it makes stays, for threads and for what runs at exit."""
    if is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    loader = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, loader
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)  # noqa: S102


def _file_of(module: str) -> str:
    """Returns the file that `python -m` runs for a module; the name, if there is none."""
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{module}.__main__")
    return module if spec is None or spec.origin is None else os.path.abspath(spec.origin)


def _searches_folder() -> bool:
    """Whether Python searches the script's folder for modules. `PYTHONSAFEPATH` turns that off."""
    return not environment().get("PYTHONSAFEPATH")


log = logging.getLogger(__name__)


@dataclass(slots=True)
class ScriptOutcome:
    """How the script ended: the exit code, the worker's result, and the error to print."""

    code: int
    error: str = ""
    traceback: str = ""
    hint: str = ""
    """The end of `error` that the traceback does not contain."""
    result: dict[str, Any] = field(default_factory=dict)
    stuck: bool = False
    """A broken ring left threads that end only with the process."""

    @property
    def last_line(self) -> dict[str, Any]:
        """The worker's result with the exit code, and with the error if there is one."""
        return {**self.result, "exit_code": self.code, **({"error": self.error} if self.error else {})}

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
) -> ScriptOutcome:
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
    gc.freeze()  # else full collections would look through torch's objects: 0.2 s each time, and at the exit
    if words and not words[0].startswith("-"):
        script = Script(words[0], is_module)
        script.check()
        context.prepare(config, origin, script.name)
        place = detect(environment(), config.rank, config.world_size, config.local_rank)
        if config.as_horovod:
            alias.install()
            alias.tell_place(place)
        export_place(place)
        export({"KERAS_BACKEND": "torch"} | environment())  # the only one that trains here
        with gloo_answered(config), no_lightning_group():
            outcome = _run(lambda: script.run(words[1:]), script)
        return _warn_unused_server(outcome, config)
    if is_module:
        raise UsageError("--module: the module is missing; for example: ps-worker -m package.train [ARGS]...")
    require_for_job(job)
    # All ranks must pass the same arguments to a built-in job, so they are part of the job's name.
    context.prepare(config, origin, " ".join([job, *words]))
    return _run(lambda: importlib.import_module(module).main(words))


def _run(action: Callable[[], object], script: Script | None = None) -> ScriptOutcome:
    """Runs the script. In every case the worker leaves the job and sends the reason."""
    StopSignals().install()
    pid, line, shown = os.getpid(), "", list[BaseException]()
    outcome, reason = ScriptOutcome(0), LeaveReason.FINISHED
    try:
        _call(action, shown)
        terminal.ignore_stop_signals()
        context.shutdown()
    except Preempted as stop:
        outcome, reason = ScriptOutcome(_exit_code(stop)), LeaveReason.PREEMPTED
        log.info("%s", stop.text)
    except SystemExit as end:
        text = end.code if isinstance(end.code, str) else f"the script exited with {_exit_code(end)}"
        outcome = ScriptOutcome(_exit_code(end), error=text)
        reason = LeaveReason.FAILED
    except KeyboardInterrupt:
        outcome, reason = ScriptOutcome(INTERRUPTED, error="interrupted"), LeaveReason.PREEMPTED
    except BaseException as error:
        if (own := _own(error)) is None:
            outcome, reason = _failed(error)
        else:
            cause = _server_cause(own)
            outcome = ScriptOutcome(cause.exit_code, error=str(cause))
            reason, line = context.reason_of(cause), script.line(error) if script is not None else ""
        if error in shown:
            outcome.traceback = ""
    if os.getpid() != pid:  # a process that the script forked; it ends as in plain Python
        print(outcome.text("a process that the script forked"), file=sys.stderr, end="")
        raise SystemExit(outcome.code)
    _leave(outcome, reason)
    # Added last: the other workers receive the message without it, and each adds its own line.
    outcome.error += line
    return outcome


def _stop_code() -> int | None:
    """Returns the exit code of a worker that was asked to stop."""
    worker = context.started()
    return None if worker is None else worker.stop_code


def _failed(error: BaseException) -> tuple[ScriptOutcome, LeaveReason]:
    # C++ adds its callers to the error of a DDP model.
    last = traceback.format_exception_only(error)[-1].strip().partition("\n\nAt:\n")[0]
    if (code := _stop_code()) is not None:
        # The signal also stopped the script's own child processes, and their exit made the script fail.
        text = f"stopped on request, before the step finished: {last}"
        return ScriptOutcome(code, error=text), LeaveReason.PREEMPTED
    hint = _missing_package_hint(error) or process_group_hint(error) or _shared_memory_hint(error)
    text = f"{last}: {hint}" if hint else last
    return ScriptOutcome(1, error=text, traceback=_traceback(error), hint=hint), LeaveReason.FAILED


def _missing_package_hint(error: BaseException) -> str:
    """Returns how to install, or to do without, a package that the script imports."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    if error.name == "tensorflow":
        return alias.KERAS_3
    if error.name == "horovod":
        return "to run the script unchanged, use ps-worker --as-horovod SCRIPT"
    return how_to_install(error.name) if error.name in EXTRAS else ""


def _shared_memory_hint(error: BaseException) -> str:
    """Returns the size of /dev/shm if a DataLoader process may have failed because it is too small."""
    if not isinstance(error, RuntimeError) or "shared memory" not in str(error):
        return ""
    room = shutil.disk_usage("/dev/shm")  # noqa: S108 - where torch puts batches
    return (
        f"no room: /dev/shm has {room.total} bytes, {room.free} bytes are free: start the container with more"
        " shared memory, for example --shm-size=1g, or set num_workers=0 in the DataLoader"
    )


def _call(action: Callable[[], object], shown: list[BaseException]) -> None:
    """Runs the script to its end, as Python does. `sys.exit(0)` counts as a normal end.

    Args:
        action: Runs the script.
        shown: Gets the error that the script's own error hook has shown.
    """
    hook = sys.excepthook
    with outputs_restored():
        try:
            action()
        except SystemExit as end:
            if _exit_code(end):
                raise
        except BaseException as error:
            if _shows_errors(hook, error) and _stop_code() is None and _shows(error):
                shown.append(error)
            raise
        _end_threads()
    worker = context.started()
    if worker is not None and worker.leaving:  # only a thread of the script got the error, or it was caught
        raise Preempted("stopped on request", worker.stop_code or Preempted.exit_code)


def _shows_errors(before: object, error: BaseException) -> bool:
    """Whether the script has set an error hook. That of torch's groups adds nothing to our own errors."""
    of_torch = getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d"
    return sys.excepthook is not before and not (of_torch and _own(error) is not None)


def _shows(error: BaseException) -> bool:
    """Whether the script's error hook, which gets what Python would give it, shows the error."""
    kind, frames = type(error), _frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error.with_traceback(frames), frames
    try:
        sys.excepthook(kind, error, frames)
    except SystemExit:
        raise
    except BaseException as failure:
        print("Error in sys.excepthook:", *traceback.format_exception(failure), file=sys.stderr, sep="\n")
        return False
    return True


def _end_threads() -> None:
    """Ends executors and waits for threads that may still train, as Python does at its end."""
    at_exit: list[Callable[[], object]] = threading._threading_atexits  # type: ignore[attr-defined]
    while at_exit:
        at_exit.pop()()
    own = threading.current_thread()
    while threads := [each for each in threading.enumerate() if each is not own and not each.daemon]:
        for thread in threads:
            thread.join()


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
    broken_ring = isinstance(error, RingBroken) and worker.communicator.members is None
    if broken_ring or isinstance(error, Fenced) or lost_shard:
        return worker.session.verdict() or error
    return error


def _leave(outcome: ScriptOutcome, reason: LeaveReason) -> None:
    # A second signal quits at once, even while other workers still need this worker's shard.
    with contextlib.suppress(KeyboardInterrupt, Preempted):
        context.shutdown(reason, outcome.error)
    outcome.result = context.result()
    outcome.stuck = outcome.code != 0 and outcome.result.get("topology") == "ring"


def _warn_unused_server(outcome: ScriptOutcome, config: WorkerConfig) -> ScriptOutcome:
    by_ps_run = environment().get(LAUNCHER_VARIABLE) == "ps-run"  # which reports it once, for all workers
    if config.server is not None and not outcome.result and outcome.code == 0 and not by_ps_run:
        log.warning("the script did not call hubring.init(): it did not join the job at %s", config.server)
    return outcome


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _frames(error)))


def _frames(error: BaseException) -> TracebackType | None:
    """Returns the error's frames without those of this file and of runpy."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename) and frames.tb_next is not None:
        frames = frames.tb_next
    return frames


def _is_ours(filename: str) -> bool:
    return filename in (__file__, runpy.__file__) or filename.startswith("<frozen")


def _exit_code(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)
