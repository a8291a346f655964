"""The section with the headline, the alarms and the main figures."""

from __future__ import annotations

from collections.abc import Iterator

from hubring.ps.page.history import sample
from hubring.ps.page.kit.figures import NOTHING, duration, loss, number, percent
from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Snapshot

_MACROS = TEMPLATES.macros("summary.html")

MOST_ALARMS = 3
"""How many silent workers get their own alarm; one more alarm counts the rest."""


def summary(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders the page's first section."""
    return Section(_MACROS.section(headline(snapshot), alarms(snapshot), _figures(snapshot)))


def headline(snapshot: Snapshot) -> str:
    """Returns the job's state in a few words."""
    report, count = snapshot.report, len(snapshot.present)
    if not report["job"]:
        return "No job yet: waiting for the first worker"
    if report["failure"]:
        return f"{report['job']} has failed"
    if not report["started"]:
        return f"{report['job']}: {report['state']}"
    if not count:
        return f"{report['job']} has ended"
    who = f"{report['job']}: {count} worker{'s' if count > 1 else ''}"
    if report["draining"]:
        return f"{who} finish{'es' if count == 1 else ''} the step and leave"
    topology = "on the ring" if snapshot.on_ring else f"through the hub ({report['mode']})"
    return f"{who} train{'s' if count == 1 else ''} {topology}"


def alarms(snapshot: Snapshot) -> Iterator[str]:
    """Yields the problems that a user should know."""
    report = snapshot.report
    if report["failure"]:
        yield report["failure"]
    yield from snapshot.troubles
    for worker in snapshot.silent[:MOST_ALARMS]:
        yield (
            f"Rank {worker.rank} ({worker.where}) has been {worker.doing}; after"
            f" {report['lease_seconds']:g} s it is lost."
        )
    if len(snapshot.silent) > MOST_ALARMS:
        yield f"{len(snapshot.silent) - MOST_ALARMS} more workers are silent; see the table of workers."
    for shard in snapshot.shards:
        if shard.silent:
            yield f"Shard {shard.index} ({shard.where}) has been silent for {int(shard.silent)} s."
    held = [worker for worker in snapshot.workers if worker.state == "blocked"]
    if held:
        longest = int(max(worker.waiting for worker in held))
        who = f"the slowest worker is {report['slowest']}" if report["slowest"] else "no worker is slower"
        number_of = "1 worker has" if len(held) == 1 else f"{len(held)} workers have"
        yield f"{number_of} been blocked for up to {longest} s; {who}."


def _figures(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    report, present = snapshot.report, snapshot.present
    now = sample(report)
    yield "Step", f"{report['step']:,}" if report["job"] else NOTHING
    if report["progress"] is not None:
        yield "Done", percent(report["progress"])
        left = report["seconds_left"]
        yield "Time left, about", NOTHING if left is None else duration(left)
    yield "Loss", loss(now.loss)
    yield "Steps/s per worker", number(now.rate / len(present)) if present else NOTHING
    yield "Steps/s in total", number(now.rate) if present else NOTHING
    if now.samples_rate:
        yield "Samples/s in total", number(now.samples_rate)
    yield "Workers", f"{len(present)} of {report['world_size'] or '?'}"
    yield "Shards", NOTHING if snapshot.on_ring else f"{len(snapshot.shards)} of {report['shards_wanted']}"
    yield "Epoch", str(report["epoch"])
    if report["failovers"]:
        yield "Failovers", str(report["failovers"])
    if report["ring_generation"]:
        yield "Generation", str(report["ring_generation"])
    age = report["checkpoint_age"]
    yield "Since checkpoint", NOTHING if age is None else duration(age)
    yield "Uptime", duration(report["seconds_up"])
