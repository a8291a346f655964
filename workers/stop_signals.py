"""What a signal to stop does to a training script.

Law: the first signal stops the worker after its step. A script that takes no more steps, because it evaluates
or hangs, ends after a grace period. A second signal stops the worker at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from types import FrameType

from hubring.ps.core.errors import Preempted
from hubring.workers.runtime import context
from hubring.workers.runtime.worker import Worker

log = logging.getLogger(__name__)

INTERRUPTED = 128 + signal.SIGINT
CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: Preempted.exit_code,
    signal.SIGUSR1: Preempted.exit_code,
}
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
        """When the first SIGTERM or SIGINT came; 0 before."""
        self._overdue = False
        self._ending = threading.Event()

    def install(self) -> None:
        """Installs the handlers."""
        for number in CODES:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        worker = context.started()
        forked = worker is not None and worker.pid != os.getpid()
        if forked and number == signal.SIGTERM:  # how multiprocessing ends its children
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
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise Preempted("stopped on request, at once")
        worker.stop_code, worker.notice = CODES[signal.Signals(number)], number == signal.SIGUSR1
        if forked:  # a DataLoader's process gets Ctrl-C too; the worker still needs it
            return
        what = "all workers stop after the same step" if worker.stops_all else "stopping after this step"
        limit = "" if worker.notice else f", or if none ends within {grace(worker):.0f} s"
        quits = "press Ctrl-C" if worker.notice else "send it again"
        log.warning("%s: %s%s; %s to quit at once", signal.Signals(number).name, what, limit, quits)
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
        threading.Thread(target=self._watch, args=(worker, number), name="stop", daemon=True).start()

    def _watch(self, worker: Worker, number: int) -> None:
        step, since = worker.completed_steps, self._asked
        while time.monotonic() - since < grace(worker):
            time.sleep(LOOK_SECONDS)
            if _leaves(worker):
                return
            if worker.completed_steps != step:
                step, since = worker.completed_steps, time.monotonic()
        self._overdue = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)
        if not self._ending.wait(STUCK_SECONDS) and not _leaves(worker):
            log.error("the script does not react, so this process ends at once; to see why: py-spy dump")
            sys.stdout.flush()
            os._exit(_code(worker))


def grace(worker: Worker) -> float:
    """Returns the seconds that a worker that was asked to stop has for a step."""
    return max(GRACE_SECONDS, SLOW_STEPS * worker.step_seconds)


def _leaves(worker: Worker) -> bool:
    return worker.leaving or context.started() is not worker


def _code(worker: Worker) -> int:
    return worker.stop_code or Preempted.exit_code
