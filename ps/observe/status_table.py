"""A hub's status for people: a few lines and two tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

WATCH_SECONDS = 1.0
MEGABYTE = 1e6
GIGABYTE = 1e9


def show(report: Mapping[str, Any]) -> None:
    """Prints the status to standard output."""
    Console(highlight=False).print(render(report))


def watch(read: Callable[[], Mapping[str, Any]]) -> None:
    """Shows the status, which `read` returns, in place until Ctrl-C."""
    first, console = render(read()), Console(highlight=False)
    with suppress(KeyboardInterrupt), Live(first, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(render(read()), refresh=True)


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
    rows = [*map(_worker, report["workers"])], [*map(_shard, report["shards"])]
    tables = [_table(each) for each in rows if each]
    return Group(*map(escape, lines), *tables, *_departures(report))


def _done(report: Mapping[str, Any]) -> str:
    done, left = report["progress"], report["seconds_left"]
    if done is None:
        return ""
    return f", {done:.0%} done" + ("" if left is None else f", about {left:.0f} s left")


def _worker(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the cells of a worker by their columns."""
    return {
        "rank": str(row["rank"]),
        "host": row["host"],
        "pid": str(row["pid"]),
        "step": str(row["step"]),
        "steps/s": f"{row['steps_per_second']:.3g}",
        "samples/s": f"{row['samples_per_second']:.4g}" if row["samples"] else "-",
        "loss": "-" if row["loss"] is None else f"{row['loss']:.4g}",
        "GB": f"{row['memory_bytes'] / GIGABYTE:.1f}" if row["memory_bytes"] else "-",
        "waiting": f"{row['seconds_waiting']:.1f} s" if row["seconds_waiting"] else "-",
        "heartbeat": f"{row['seconds_since_heartbeat']:.1f} s ago",
    }


def _shard(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the cells of a shard by their columns."""
    return {
        "shard": str(row["shard"]),
        "host": row["host"],
        "pid": str(row["pid"]),
        "keys": str(row["keys"] or "none"),
        "version": str(row["oldest_version"]),
        "pushes": str(row["pushes"]),
        "MB in": f"{row['bytes_in'] / MEGABYTE:.1f}",
        "MB out": f"{row['bytes_out'] / MEGABYTE:.1f}",
        "heartbeat": row.get("error") or f"{row['seconds_since_heartbeat']:.1f} s ago",
    }


def _departures(report: Mapping[str, Any]) -> list[str]:
    """Returns a line for each worker that failed or was lost, and for each that can be replaced."""
    ended = report["ended"]
    return [
        escape(f"rank {rank} {how}: {why}")
        for how, ranks in (("failed", ended["failed"]), ("lost", ended["lost"]))
        for rank, why in ranks.items()
    ] + [escape(f"replace rank {rank} with: {command}") for rank, command in report["replace"].items()]


def _table(rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(*rows[0], box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(escape, row.values()))
    return table
