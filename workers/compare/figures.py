"""Figures: what the numbers of a row are called, and how they are written for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hubring.ps.page.kit.figures import NOTHING, digits, size
from hubring.workers.compare.result.findings import Number


def _four(value: float) -> str:
    return digits(value, 4)


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the numbers of `results.json`.

    Attributes:
        title: What people call it.
        unit: Written after a value; empty where the value says it.
        write: Makes text of a value.
        worst: Of all seeds the greatest value is told, not the median.
    """

    title: str
    unit: str = ""
    write: Callable[[float], str] = digits
    worst: bool = False

    @property
    def head(self) -> str:
        """For the head of a column."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def interval(self, number: Number | None) -> str:
        """`median (low–high)`, or one value alone where they are one, or where it is the worst."""
        if number is None:
            return NOTHING
        if self.worst:
            return self.write(number.most)
        low, high = self.write(number.low), self.write(number.high)
        middle = self.write(number.median)
        return middle if low == high else f"{middle} ({low}–{high})"


def figures(samples: str, metric: str) -> dict[str, Figure]:
    """All of them by the names that they have in `results.json`.

    Args:
        samples: What the job calls its samples.
        metric: What its measure is called.
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
        "queue_ms": Figure("queue at the server", "ms"),
        "apply_ms": Figure("apply at the server", "ms"),
        "staleness_mean": Figure("staleness, mean"),
        "staleness_max": Figure("staleness, most over all seeds", write="{:g}".format, worst=True),
        "memory_mb": Figure("memory", "MB"),
        "cpu_ms_per_step": Figure("CPU a step", "ms"),
    }
