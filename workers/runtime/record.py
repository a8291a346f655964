"""Record: what a script reports as it trains, one JSON object a line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hubring.ps.core.errors import UsageError


class Record:
    """Keeps the latest value of every metric, and writes each report to a file if there is one.

    Every line holds `step` (completed steps), `seconds` (since training began),
    `exposed_seconds` (of these, what exchanges took), `hidden_seconds` (for which
    exchanges were on their way meanwhile; null if nobody counts it) and the metrics reported.

    Args:
        path: The file, begun afresh; None keeps the latest values only.
    """

    def __init__(self, path: Path | None) -> None:
        self.step = 0
        self.latest: dict[str, Any] = {}
        self._file = path.open("w", buffering=1) if path is not None else None
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since `begin`, or since the record was made."""
        return time.monotonic() - self._began

    def begin(self) -> None:
        """Starts the clock: the model is in place and training may begin."""
        self._began = time.monotonic()

    def report(self, metrics: dict[str, Any], exposed: float, hidden: float | None) -> None:
        """Takes down some metrics: numbers, strings or booleans; a tensor of one element is its number.

        Args:
            metrics: By their names.
            exposed: Seconds that exchanges have taken from training so far.
            hidden: Seconds for which they were on their way behind computing; None: not counted.

        Raises:
            UsageError: A metric is something else.
        """
        metrics = {name: _scalar(name, value) for name, value in metrics.items()}
        self.latest.update(metrics)
        if self._file is not None:
            exchange = {
                "exposed_seconds": round(exposed, 6),
                "hidden_seconds": None if hidden is None else round(hidden, 6),
            }
            line = {"step": self.step, "seconds": round(self.seconds, 6), **exchange, **metrics}
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _scalar(name: str, value: Any) -> Any:
    if hasattr(value, "item"):  # a tensor, or one of NumPy's numbers
        try:
            value = value.item()
        except (RuntimeError, ValueError) as cause:
            raise UsageError(f"report({name}=...): {cause}; report one number") from cause
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(
        f"report({name}=...) got a {type(value).__name__}; report a number, a string or a boolean"
    )
