"""The metrics that a script reports during training, one JSON object a line."""

from __future__ import annotations

import json
import time
from math import inf
from pathlib import Path
from typing import Any

from hubring.ps.core.errors import UsageError

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
            exchange = {
                "exposed_seconds": None if exposed is None else round(exposed, 6),
                "hidden_seconds": None if hidden is None else round(hidden, 6),
            }
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
    raise UsageError(
        f"report({name}=...) got a {type(value).__name__}; report a number, a string or a boolean"
    )
