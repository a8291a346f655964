"""What a signal to stop does to a training script.

Law: the first signal stops the worker after its step. A script that takes no more steps, because it
evaluates or hangs, ends after a grace period. A second signal stops the worker at once.

Python runs a handler only between two instructions of the main thread, and a call of another library can take
minutes. So the grace period begins in a thread, to which the interpreter writes each signal as it comes.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Set as AbstractSet
from functools import cache
from types import FrameType

from hubring.ps.core.errors import Preempted
from hubring.ps.core.standard_streams import flush_outputs
from hubring.workers.runtime import context
from hubring.workers.runtime.worker import Worker

log = logging.getLogger(__name__)

INTERRUPTED = 128 + signal.SIGINT
CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: Preempted.exit_code, signal.SIGUSR1: Preempted.exit_code}
GRACE_SECONDS = 20.0
"""How long a worker that was asked to stop has for each step. Launchers kill after 30 s, many of them."""
SLOW_STEPS = 2.0
"""A step may take this many times as long as the last one."""
REPEAT_SECONDS = 2.0
"""A launcher forwards a signal that the scheduler sends too; both are one request."""
STUCK_SECONDS = 10.0
"""How long the main thread has to notice that it must end, before the process ends without it."""
LOOK_SECONDS = 0.1


class StopSignals:
    """Handles SIGINT, SIGTERM and a scheduler's notice, SIGUSR1, in this process."""

    def __init__(self) -> None:
        self._asked = 0.0
        """When the first SIGTERM or SIGINT was handled; 0 before."""
        self._watched: object = None
        """What watches the grace period."""
        self._raised = -math.inf
        """When the script last got the error of a signal, and the decision what to do."""
        self._overdue = False
        self._ending = threading.Event()

    def install(self) -> None:
        """Installs the handlers."""
        for number in CODES:
            signal.signal(number, self._handle)
        arrivals, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        _guard_forks()
        threading.Thread(target=self._attend, args=(arrivals,), name="signals", daemon=True).start()

    def _attend(self, arrivals: int) -> None:
        """Begins the grace period of each signal that this process's handler gets.

        The script may have the error of a signal before this thread reads of it.
        """
        while came := os.read(arrivals, 1):
            number = came[0]
            ours = number in (signal.SIGTERM, signal.SIGINT) and signal.getsignal(number) == self._handle
            if ours and time.monotonic() - self._raised > REPEAT_SECONDS:
                self._begin_watch(context.started(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _forking.goes_on:  # Python would swallow an error
            threading.Timer(LOOK_SECONDS, os.kill, (os.getpid(), number)).start()
            return
        worker = context.started()
        forked = worker is not None and worker.pid != os.getpid()
        if forked and number == signal.SIGTERM:  # a handler of the script calls this one
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if forked and number == signal.SIGUSR1:
            return
        if worker is not None and self._overdue:
            self._ending.set()
            raise Preempted(f"stopped on request; no step ended within {grace(worker):.0f} s", _code(worker))
        if worker is not None and worker.stop_code is not None and self._repeats(worker, number):
            self._begin_grace(worker, number)
            return
        if worker is None or not worker.trainers or worker.stop_code is not None:
            self._raised, self._watched = time.monotonic(), None
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise Preempted("stopped on request, at once")
        worker.stop_code, worker.notice = CODES[signal.Signals(number)], number == signal.SIGUSR1
        if forked:  # a DataLoader's process gets Ctrl-C too; the worker still needs it
            return
        what = "all workers stop after the same step" if worker.stops_all else "stopping after this step"
        limit = "" if worker.notice else f", or if none ends within {grace(worker):.0f} s"
        quits = "press Ctrl-C" if worker.notice else "send it again"
        _tell(f"{signal.Signals(number).name}: {what}{limit}; {quits} to quit at once")
        self._begin_grace(worker, number)

    def _repeats(self, worker: Worker, number: int) -> bool:
        """Whether this signal only repeats the one before."""
        if number == signal.SIGUSR1 or (number == signal.SIGTERM and not self._asked):
            return True  # a scheduler sends its notice first, and SIGTERM later
        forwarded = number == signal.SIGTERM and worker.placement.ends_together
        return forwarded and time.monotonic() - self._asked < REPEAT_SECONDS

    def _begin_grace(self, worker: Worker, number: int) -> None:
        """Watches the steps from the first SIGTERM or SIGINT on. A notice comes long before the end."""
        if number == signal.SIGUSR1 or self._asked:
            return
        self._asked = time.monotonic()
        self._begin_watch(worker, number)

    def _begin_watch(self, worker: Worker | None, number: int) -> None:
        if self._watched is None:
            self._watched = watched = object()
            threading.Thread(target=self._watch, args=(worker, number, watched), daemon=True).start()

    def _watch(self, worker: Worker | None, number: int, watched: object) -> None:
        step, since = _steps(worker), time.monotonic()
        while time.monotonic() - since < grace(worker):
            time.sleep(LOOK_SECONDS)
            if _leaves(worker) or self._watched is not watched:
                return
            if _steps(worker) != step:
                step, since = _steps(worker), time.monotonic()
        self._overdue = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)
        if not self._ending.wait(STUCK_SECONDS) and not _leaves(worker) and self._watched is watched:
            log.error("the script does not react, so this process ends at once; to see why: py-spy dump")
            flush_outputs()
            os._exit(_code(worker))


def _tell(text: str) -> None:
    """Logs from a thread: a handler that interrupts a print to standard error cannot write there itself."""
    threading.Thread(target=log.warning, args=("%s", text), name="stop notice").start()


class _Fork(threading.local):
    """A fork by this thread."""

    goes_on = False
    mask: AbstractSet[int] = frozenset()
    """The signals that were blocked before."""


_forking = _Fork()


@cache
def _guard_forks() -> None:
    """Holds signals back while a process forks: CPython loses those that reach a child at once.

    A child writes to the parent's pipe, as if the signal were the parent's, until it has its own handling.
    """
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget_arrivals)


def _hold() -> None:
    _forking.goes_on = True
    _forking.mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, ()
    )  # before, since handlers of the script can raise
    signal.pthread_sigmask(signal.SIG_BLOCK, CODES)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)
    _forking.goes_on = False


def _forget_arrivals() -> None:
    """Keeps a forked child's signals from its parent, and lets SIGTERM end it, as multiprocessing does.

    A handler of Python would be too late for a child that is about to wait for a lock.
    """
    signal.set_wakeup_fd(-1)
    if getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is StopSignals._handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()


def grace(worker: Worker | None) -> float:
    """Returns the seconds that a worker that was asked to stop has for a step."""
    return max(GRACE_SECONDS, SLOW_STEPS * worker.step_seconds) if worker is not None else GRACE_SECONDS


def _steps(worker: Worker | None) -> int:
    return worker.completed_steps if worker is not None else 0


def _leaves(worker: Worker | None) -> bool:
    return context.started() is not worker or (worker is not None and worker.leaving)


def _code(worker: Worker | None) -> int:
    return (worker and worker.stop_code) or Preempted.exit_code
