"""A hub's status for people: a few lines and two tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

MEGABYTE = 1e6
GIGABYTE = 1e9


def show(report: Mapping[str, Any]) -> None:
    """Prints the status to standard output."""
    Console(highlight=False).print(render(report))


def render(report: Mapping[str, Any]) -> Group:
    """Returns what `show` prints.

    Args:
        report: The status as `ps-server status --json` prints it.
    """
    mode = f", {report['mode']}" if report["topology"] == "hub" else ""
    how = f" ({report['topology']}{mode})" if report["topology"] else ""
    lines = [
        f"job      {report['job'] or '-'}{how}: {report['state']}",
        f"step     {report['step']}{_done(report)}",
        f"up       {report['seconds_up']:.0f} s, Hubring {report['version']}",
        f"saved    {report['checkpoint'] or 'no checkpoint'}",
    ]
    if report["slowest"]:
        lines.append(f"slowest  {report['slowest']}")
    tables = [_workers(report)] if report["workers"] else []
    tables += [_shards(report)] if report["shards"] else []
    return Group(*map(escape, lines), *tables, *_departures(report))


def _done(report: Mapping[str, Any]) -> str:
    done, left = report["progress"], report["seconds_left"]
    if done is None:
        return ""
    return f", {done:.0%} done" + ("" if left is None else f", about {left:.0f} s left")


def _workers(report: Mapping[str, Any]) -> Table:
    table = _table(
        "rank", "host", "pid", "step", "steps/s", "samples/s", "loss", "GB", "waiting", "heartbeat"
    )
    for row in report["workers"]:
        table.add_row(
            str(row["rank"]),
            escape(row["host"]),
            str(row["pid"]),
            str(row["step"]),
            f"{row['steps_per_second']:.3g}",
            f"{row['samples_per_second']:.4g}" if row["samples"] else "-",
            "-" if row["loss"] is None else f"{row['loss']:.4g}",
            f"{row['memory_bytes'] / GIGABYTE:.1f}" if row["memory_bytes"] else "-",
            f"{row['seconds_waiting']:.1f} s" if row["seconds_waiting"] else "-",
            f"{row['seconds_since_heartbeat']:.1f} s ago",
        )
    return table


def _shards(report: Mapping[str, Any]) -> Table:
    table = _table("shard", "host", "pid", "keys", "version", "pushes", "MB in", "MB out", "heartbeat")
    for row in report["shards"]:
        table.add_row(
            str(row["shard"]),
            escape(row["host"]),
            str(row["pid"]),
            str(row["keys"] or "none"),
            str(row["oldest_version"]),
            str(row["pushes"]),
            f"{row['bytes_in'] / MEGABYTE:.1f}",
            f"{row['bytes_out'] / MEGABYTE:.1f}",
            escape(row.get("error") or f"{row['seconds_since_heartbeat']:.1f} s ago"),
        )
    return table


def _departures(report: Mapping[str, Any]) -> list[str]:
    """Returns a line for each worker that failed or was lost, and for each that can be replaced."""
    ended = report["ended"]
    return [
        escape(f"rank {rank} {how}: {why}")
        for how, ranks in (("failed", ended["failed"]), ("lost", ended["lost"]))
        for rank, why in ranks.items()
    ] + [escape(f"replace rank {rank} with: {command}") for rank, command in report["replace"].items()]


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    return table
