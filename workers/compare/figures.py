"""Figures: the titles and units of a row's numbers, and how to format them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hubring.ps.page.kit.figures import NOTHING, digits, size
from hubring.workers.compare.result.findings import Number

PART = "(2/3): only 2 of 3 seeds have a value, and the median and its interval are of those seeds."
"""What such a mark at a number means."""


def partial(numbers: Iterable[Number | None]) -> str:
    """Returns `PART` if a number has no value for some seeds; empty if none is like that."""
    return "" if all(number is None or number.complete for number in numbers) else PART


def _four(value: float) -> str:
    return digits(value, 4)


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the numbers of `results.json`.

    Attributes:
        title: Its name in reports.
        unit: Written after a value; empty where the formatted value contains it.
        write: Formats a value.
        worst: Show the largest value of all seeds, not the median.
    """

    title: str
    unit: str = ""
    write: Callable[[float], str] = digits
    worst: bool = False

    @property
    def head(self) -> str:
        """Head of a table column."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def interval(self, number: Number | None) -> str:
        """Returns the `span`, and ` (2/3)` if only 2 of 3 seeds have a value."""
        return NOTHING if number is None else f"{self.span(number)}{number.part}"

    def span(self, number: Number) -> str:
        """Returns `median (low–high)`; a single value if there is only one, or for `worst`."""
        if self.worst:
            return self.write(number.most)
        low, high = self.write(number.low), self.write(number.high)
        middle = self.write(number.median)
        return middle if low == high else f"{middle} ({low}–{high})"


def figures(samples: str, metric: str) -> dict[str, Figure]:
    """Returns all figures by their names in `results.json`.

    Args:
        samples: The job's word for its samples.
        metric: Title of the job's metric.
    """
    return {
        "samples_per_second": Figure("throughput", f"{samples}/s"),
        "step_ms": Figure("step", "ms"),
        "step_mean_ms": Figure("step, mean", "ms"),
        "seconds_to_target": Figure("to target", "s"),
        "samples_to_target": Figure("to target", samples),
        "seconds": Figure("whole run", "s"),
        "final_loss": Figure("final loss"),
        "final_metric": Figure(metric, write=_four),
        "bytes_sent_per_step": Figure("sent a step", write=size),
        "bytes_received_per_step": Figure("received a step", write=size),
        "compute_ms": Figure("compute", "ms"),
        "exposed_ms": Figure("exposed exchange", "ms"),
        "hidden_ms": Figure("hidden exchange", "ms"),
        "read_wait_ms": Figure("read wait", "ms"),
        "queue_ms": Figure("server queue", "ms"),
        "apply_ms": Figure("server apply", "ms"),
        "staleness_mean": Figure("staleness, mean"),
        "staleness_max": Figure("staleness, max over all seeds", write="{:g}".format, worst=True),
        "memory_mb": Figure("memory", "MB"),
        "cpu_ms_per_step": Figure("CPU a step", "ms"),
        "record_ms": Figure("gate's record a step", "ms"),
        "pause_seconds": Figure("pause after the loss", "s"),
        "price_per_epoch": Figure("price of an epoch"),
        "price_to_target": Figure("price to target"),
        "lost_steps": Figure("steps repeated after the loss"),
    }
