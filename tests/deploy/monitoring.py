"""What deploy/monitoring asks for, and what a hub exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hubring.ps.observe.metrics import METRICS, Metric

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "hubring.json"


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def series_of(metric: Metric) -> set[str]:
    """The names that a metric's series have."""
    suffixes = ("_bucket", "_sum", "_count") if metric.type == "histogram" else ("",)
    return {metric.name + suffix for suffix in suffixes}


def exported() -> set[str]:
    """Every name that a hub's series have."""
    return set().union(*map(series_of, METRICS))
