"""What a worker records during training: metrics, exchanges, waits, parameters that are not finite.

Metrics are written as one JSON object a line. Exchanges in flight become spans of the trace, and the time
that overlapped with compute. The heartbeat's thread looks at the stacks of the others to see what the process
waits in, and on which line of its script. So an exchange costs nothing more for it.

No later step makes a parameter finite that is NaN or infinite. A hub refuses gradients that are not
finite. Where workers step, such a gradient can be normal: a GradScaler skips the step. There, parameters
are checked when a reported metric is not finite and before they are saved; and after 1, 2, 4, 8... steps and
at the end, for a warning only, as torch too would go on.
"""

from __future__ import annotations

import json
import linecache
import logging
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from math import inf
from pathlib import Path
from threading import get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any

from torch import Tensor
from torch.distributed import is_initialized as has_group

from hubring.ps.core.errors import NonFinite, UsageError
from hubring.ps.core.timing import Waiting
from hubring.ps.core.torch_internals import optimizers
from hubring.ps.core.trace import Trace
from hubring.ps.core.work import Work
from hubring.ps.optim.sums import all_finite
from hubring.workers.communicators.base import Communicator

log = logging.getLogger(__name__)

_EXPECTED = {"total_steps", "progress"}
"""Metrics that tell how much there is to do. Alone they are no measurement, so they make no line of the"
" record."""


MOST_SAMPLES = 2**63 - 1
"""The count of samples ends here: heartbeats and results hold it in 64 bits."""


class Record:
    """Stores the latest value of every metric and writes each report to a file.

    Every line has `step` (completed steps), `seconds` (since training began),
    `exposed_seconds` (of these, the seconds that training waited for exchanges; null on a GPU),
    `hidden_seconds` (exchange time that overlapped with compute; null on a GPU or without
    `--trace`) and the reported metrics.

    Args:
        path: The file, which is overwritten. None stores only the latest values.
    """

    def __init__(self, path: Path | None) -> None:
        self.step = 0
        self.latest: dict[str, Any] = {}
        self.samples = 0
        """Training samples so far: the sum of the reported `samples`."""
        self._file = path.open("w", buffering=1) if path is not None else None
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since `begin`, or since construction before `begin`."""
        return time.monotonic() - self._began

    def begin(self) -> None:
        """Restarts the clock when training begins."""
        self._began = time.monotonic()

    def report(self, metrics: dict[str, Any], exposed: float | None, hidden: float | None) -> None:
        """Records metrics.

        Args:
            metrics: Numbers, strings, booleans, None or tensors of one element, by name.
            exposed: Seconds so far that training waited for exchanges; None if not measured.
            hidden: Seconds so far of exchange that overlapped with compute; None if not measured.

        Raises:
            UsageError: A metric has another type.
        """
        metrics = {name: _scalar(name, value) for name, value in metrics.items()}
        self.latest.update(metrics)
        samples = metrics.get("samples")
        if isinstance(samples, (int, float)) and 0 < samples < inf:
            self.samples = min(self.samples + int(samples), MOST_SAMPLES)
        if self._file is not None and metrics.keys() - _EXPECTED:
            exchange = {"exposed_seconds": exposed, "hidden_seconds": hidden}
            line = {"step": self.step, "seconds": round(self.seconds, 6), **exchange, **metrics}
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _scalar(name: str, value: Any) -> Any:
    if hasattr(value, "item"):  # a tensor or a NumPy scalar
        try:
            value = value.item()
        except (RuntimeError, ValueError) as cause:
            raise UsageError(f"report({name}=...): {cause}; report one number") from cause
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"report({name}=...) got a {type(value).__name__}; report a number, a string or a bool")


class FlightRecorder:
    """Follows one worker's exchanges.

    Args:
        trace: Gets a row for each bucket, one for the waits and one for the steps.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._in_flight = 0
        self._busy_since = 0
        self._busy = 0
        self._waited = 0
        self._stepped = time.monotonic_ns()

    @property
    def hidden_seconds(self) -> float:
        """Seconds in which an exchange was in flight and training did not wait."""
        with self._lock:
            return max(0, self._busy - self._waited) / 1e9

    def sent(self, bucket: int, work: Work, began: int) -> None:
        """Follows an exchange until it is done.

        Args:
            bucket: Index of the bucket; the first index if several buckets are joined.
            work: The exchange.
            began: Start of the send, by `time.monotonic_ns`.
        """
        with self._lock:
            if self._in_flight == 0:
                self._busy_since = began
            self._in_flight += 1
        work.when_done(lambda _: self._done(bucket, began))

    def waited(self, began: int, ended: int, why: str = "wait") -> None:
        """Records that training waited from `began` to `ended`, by `time.monotonic_ns`."""
        self._waited += ended - began
        self._trace.span("training waits", why, began, ended)

    def stepped(self, step: int) -> None:
        """Records the end of a step."""
        began, self._stepped = self._stepped, time.monotonic_ns()
        self._trace.span("steps", f"step {step}", began, self._stepped)

    def close(self) -> None:
        """Closes the trace."""
        self._trace.close()

    def _done(self, bucket: int, began: int) -> None:
        ended = time.monotonic_ns()
        with self._lock:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy += ended - self._busy_since
        self._trace.span(f"bucket {bucket}", "exchange", began, ended)


def own_parameters(trainer: Any) -> Mapping[str, Tensor]:
    """Returns an optimizer's parameters after the last step; where they are divided, only this rank's parts.

    Other ranks need not call it, so it must not gather.
    """
    shards = getattr(trainer, "shards", None)
    if shards is not None:
        from hubring.workers.audit.sample import local

        return {name: local(part) for name, part in shards.items()}
    trainer.settle()
    parameters: Mapping[str, Tensor] = trainer.named_parameters
    return parameters


def check_finite(trainers: Iterable[Any], rank: int, step: int) -> None:
    """Checks that all parameters are finite; where they are divided, this rank's parts.

    Args:
        trainers: The optimizers.
        rank: This worker's rank, for the error message.
        step: Completed steps, for the error message.

    Raises:
        NonFinite: A parameter is not finite. The error names the first one.
    """
    for trainer in trainers:
        for name, parameter in own_parameters(trainer).items():
            values = parameter.detach()
            if not all_finite(values):
                worst = values[~values.isfinite()][0].item()
                raise NonFinite(
                    f"rank {rank}'s parameter {name} {list(parameter.shape)} holds {worst} after step {step};"
                    f" {NonFinite.fix}"
                )


def look_for_nan(trainers: Iterable[Any], communicator: Communicator, step: int) -> bool:
    """Warns on rank 0 if a parameter is NaN or infinite where workers step; a hub that steps refuses that.

    Returns whether it has warned.
    """
    if communicator.steps_on == "worker" and communicator.rank == 0:
        try:
            check_finite(trainers, 0, step)
        except NonFinite as found:
            log.warning("%s", found)
            return True
    return False


def look_for_lone_training(trainers: Collection[Any], communicator: Communicator) -> None:
    """Warns on rank 0 if an optimizer has gradients, but the workers have exchanged nothing."""
    if trainers or communicator.used or communicator.rank or communicator.size == 1 or has_group():
        return
    groups = (group for one in optimizers() for group in one.param_groups)
    if any(each.grad is not None for group in groups for each in group["params"]):
        log.warning(
            "each worker trained a model of its own: no gradient was exchanged; wrap the optimizer:"
            " optimizer = hubring.DistributedOptimizer(optimizer, model)"
        )


LONG_SECONDS = 5.0
"""Shorter waits are not reported."""

_LIBRARIES = {"hubring", "torch", "grpc", "zmq", "tqdm", "debugpy"} | sys.stdlib_module_names
"""What has threads that call no collective on their own."""


def what_waits(waiting: Waiting, communicator: Communicator) -> dict[str, Any]:
    """Returns the fields of `Telemetry` for the thread that has waited longest; none if it is not long."""
    longest = waiting.longest()
    if longest is None or longest[1] < LONG_SECONDS:
        return {}
    stacks = sys._current_frames()
    innermost = stacks.pop(longest[0], None)
    stack = [frame for frame, _ in walk_stack(innermost)] if innermost is not None else []
    work = next((frame.f_locals["self"] for frame in stack if frame.f_code is Work.wait.__code__), None)
    if any(frame.f_code.co_qualname == "Exchange._wait" for frame in stack):
        operation = "the exchange of gradients"  # of whichever bucket
    elif isinstance(work, Work):
        operation = work.what
    else:
        return {}
    stacks.pop(get_ident(), None)
    others = [frame for other in stacks.values() for frame, _ in walk_stack(other)]
    alone = all(_package(frame) in _LIBRARIES for frame in others)
    return {"operation": operation, "place": _place(stack), "held": alone and communicator.is_held()}


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _place(stack: list[FrameType]) -> str:
    """Returns the innermost line that is no library's."""
    frame = next((one for one in stack if _package(one) not in _LIBRARIES), None)
    if frame is None:
        return ""
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}:{line}: {linecache.getline(name, line).strip()}"
