"""What training costs: the hosts that a row needs, at the prices in the experiment."""

from __future__ import annotations

from hubring.workers.compare.experiment.experiment import PricesTable
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.judge.measure import Numbers

HOUR = 3600.0


def price(run: Run, numbers: Numbers, prices: PricesTable, epochs: int | None) -> Numbers:
    """Returns the prices of one run; None where its time is not known.

    Args:
        run: The run, which says how many hosts it needs.
        numbers: Its measured numbers.
        prices: Prices of a host for an hour.
        epochs: Epochs of the run; None: not known.
    """
    workers, servers = run.row.hosts(run.setting)
    second = (workers * prices.worker + servers * prices.server) / HOUR

    def of(seconds: float | None, parts: int | None = 1) -> float | None:
        return None if seconds is None or parts is None else second * seconds / parts

    return {
        "price_per_epoch": of(numbers["seconds"], epochs),
        "price_to_target": of(numbers["seconds_to_target"]),
    }
