"""The sections of the page, except its picture; the changes between two versions, and a cache of markup."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVarTuple, Unpack

from markupsafe import Markup

from hubring.ps.job.membership import heartbeat_seconds
from hubring.ps.page.kit.chart import Axis, LinearScale, bins, path
from hubring.ps.page.kit.figures import NOTHING, duration, grouped, loss, number, percent, size
from hubring.ps.page.kit.templating import Templates
from hubring.ps.page.snapshot import ShardSnapshot, Snapshot, WorkerSnapshot, WorkerState, overdue
from hubring.ps.page.status_reader import ProgressSample, progress_sample

Shown = TypeVarTuple("Shown")


class MarkupCache:
    """Pieces of a page by name. A piece that is not used in a turn is dropped.

    Attributes:
        made: How many pieces were rendered so far.
    """

    def __init__(self) -> None:
        self.made = 0
        self._before: dict[str, tuple[object, Markup]] = {}
        self._now: dict[str, tuple[object, Markup]] = {}

    def turn(self) -> None:
        """Begins a new rendering of the page."""
        self._before, self._now = self._now, {}

    def __call__(self, name: str, make: Callable[[Unpack[Shown]], Markup], *shown: *Shown) -> Markup:
        """Returns the piece `name`, which is `make(*shown)`."""
        known = self._before.get(name)
        if known is None or known[0] != shown:
            self.made += 1
            known = (shown, make(*shown))
        self._now[name] = known
        return known[1]


TEMPLATES = Templates(__package__)
"""The page's templates. Every section has one, with macros for the section and its rows."""

ROWS = "<!-- rows -->"
"""Marks the place of the rows in a section's markup. Text cannot contain it, because text is escaped."""


@dataclass(frozen=True, slots=True)
class Section:
    """The content under one heading.

    Attributes:
        frame: One element, which contains `ROWS` if the section has rows.
        rows: Elements that can be replaced separately, by id.
    """

    frame: Markup
    rows: Mapping[str, Markup] = field(default_factory=dict)

    @property
    def html(self) -> Markup:
        rows = "".join(self.rows.values())
        return Markup(str(self.frame).replace(ROWS, rows))  # noqa: S704 - all of it is markup


def changes(before: Mapping[str, Section], after: Mapping[str, Section]) -> dict[str, Markup]:
    """Returns the changed elements by id: single rows where possible, otherwise whole sections.

    Args:
        before: The old sections, by id.
        after: The new sections, with the same ids.
    """
    changed: dict[str, Markup] = {}
    for name, section in after.items():
        old = before[name]
        if section.frame != old.frame or section.rows.keys() != old.rows.keys():
            changed[name] = section.html
        else:
            changed |= {row: html for row, html in section.rows.items() if html != old.rows[row]}
    return changed


_WORKERS = TEMPLATES.macros("workers.html")


def workers_section(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders one row per rank."""
    figures = {each.rank: _worker_figures(each) for each in snapshot.workers}
    heads, rows = _heads(figures.values()), {}
    for each in snapshot.workers:
        name, cells = f"worker-{each.rank}", tuple(figures[each.rank][head] for head in heads)
        shown = each.rank, state_class(each.state), each.doing, each.replace, cells, each.where or NOTHING
        rows[name] = cache(name, _WORKERS.row, *shown)
    return Section(cache("workers", _WORKERS.section, heads), rows)


def _worker_figures(worker: WorkerSnapshot) -> dict[str, str]:
    """Returns the cells by their columns."""
    cells = {
        "Step": grouped(worker.step),
        "Steps/s": number(worker.steps_per_second),
        "Samples/s": number(worker.samples_per_second) if worker.samples else NOTHING,
        "Loss": loss(worker.loss),
        **_usage(worker),
        "GPU use": NOTHING if worker.gpu_use is None else percent(worker.gpu_use),
    }
    return cells if worker.present else dict.fromkeys(cells, NOTHING)


def _usage(process: WorkerSnapshot | ShardSnapshot) -> dict[str, str]:
    """Returns the cells of a process's CPU, memory and GPU memory."""
    memory, gpu = (size(each) if each else NOTHING for each in (process.memory_bytes, process.gpu_bytes))
    return {"CPU cores": f"{process.cores:.2f}", "Memory": memory, "GPU memory": gpu}


def _heads(rows: Collection[Mapping[str, str]]) -> tuple[str, ...]:
    """Returns the columns; those of GPUs only if a row has a value."""
    heads = next(iter(rows), {})
    return tuple(head for head in heads if "GPU" not in head or any(row[head] != NOTHING for row in rows))


def state_class(state: WorkerState) -> str:
    """Returns the CSS class that sets a state's colour."""
    return f"is-{state.replace(' ', '-')}"


_SUMMARY = TEMPLATES.macros("summary.html")

MOST_ALARMS = 3
"""How many silent workers get their own alarm; one more alarm counts the rest."""


def summary_section(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders the page's first section."""
    done = snapshot.report["progress"] if snapshot.present else None
    wanted = done is None and any(each.step for each in snapshot.present)
    figures = _main_figures(snapshot)
    return Section(_SUMMARY.section(headline(snapshot), alarms(snapshot), done, wanted, figures))


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
    late = 2 * heartbeat_seconds(report["lease_seconds"])  # one heartbeat may be late
    silent = [worker for worker in snapshot.silent if overdue(worker.seconds_since_heartbeat, late)]
    for worker in silent[:MOST_ALARMS]:
        yield (
            f"Rank {worker.rank} ({worker.where}) has been {worker.doing}; after"
            f" {report['lease_seconds']:g} s it is lost."
        )
    if len(silent) > MOST_ALARMS:
        yield f"{len(silent) - MOST_ALARMS} more workers are silent; see the table of workers."
    for shard in snapshot.shards:
        if overdue(shard.silent, late):
            yield f"Shard {shard.index} ({shard.where}) has been silent for {int(shard.silent)} s."
    held = [worker for worker in snapshot.workers if worker.state == "blocked"]
    if held:
        longest = int(max(worker.seconds_waiting for worker in held))
        who = f"the slowest worker is {report['slowest']}" if report["slowest"] else "no worker is slower"
        number_of = "1 worker has" if len(held) == 1 else f"{len(held)} workers have"
        yield f"{number_of} been blocked for up to {longest} s; {who}."


def _main_figures(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    report, present = snapshot.report, snapshot.present
    now, total = progress_sample(report), max((row["total_steps"] for row in report["workers"]), default=0)
    of = f" of {total:,}" if total else ""
    yield "Step", f"{report['step']:,}{of}" if report["job"] else NOTHING
    if "epoch" in (metrics := dict(now.metrics)):
        yield "Epoch", number(metrics["epoch"])
    if report["progress"] is not None:
        yield "Done", percent(report["progress"])
        left = report["seconds_left"]
        yield "Time left, about", NOTHING if left is None else duration(left)
    if now.samples_rate:
        yield "Samples/s in total", number(now.samples_rate)
    yield "Steps/s per worker", number(now.rate / len(present)) if present else NOTHING
    yield "Loss", loss(now.loss)
    if uses := [each.gpu_use for each in present if each.gpu_use is not None]:
        yield "GPU use, mean", percent(sum(uses) / len(uses))
    yield "Workers", f"{len(present)} of {report['world_size'] or '?'}"
    if not snapshot.on_ring:
        yield "Shards", f"{len(snapshot.shards)} of {report['shards_wanted']}"
    if report["failovers"]:
        yield "Failovers", str(report["failovers"])
    if report["ring_generation"]:
        yield "Ring generation", str(report["ring_generation"])
    age = report["checkpoint_age"]
    yield "Since checkpoint", NOTHING if age is None else duration(age)
    yield "Uptime", duration(report["seconds_up"])


MOST_ROWS = 24
"""Limit on the table's rows: the last sample, and evenly spaced samples before it."""

_CURVES = TEMPLATES.macros("course.html")


def curve(
    name: str,
    title: str,
    points: Sequence[tuple[int, float]],
    write: Callable[[float], str],
    unit: str = "step",
    *,
    zero: bool = False,
) -> dict[str, Any]:
    """Returns the template's values for one curve.

    Args:
        name: Prefix of the ids.
        title: The curve's title.
        points: Pairs of step and value, with rising steps; or of second and value, where no step is counted.
        write: Formats a value.
        unit: `step` or `second`.
        zero: Whether the scale includes 0, as that of a single value always does.
    """
    if not points:
        return {"title": title, "path": ""}
    values = {value for _, value in points}
    scale = LinearScale.around(values, zero or len(values) == 1, most=5)
    (begin, first), (end, last) = points[0], points[-1]
    across = end - begin or 1
    # A single sample becomes a horizontal line, because a line of length 0 is invisible.
    drawn = points if len(points) > 1 else [(begin, first), (begin + across, first)]
    return {
        "name": name,
        "title": title,
        "unit": unit,
        "path": path(((at - begin) / across, scale.place(value)) for at, value in drawn),
        "levels": Axis(scale, write=write).ticks,
        "begin": begin,
        "end": end,
        "first": write(first),
        "last": write(last),
        # For the script, which shows the value under the pointer.
        "steps": " ".join(str(at) for at, _ in points),
        "readings": " ".join(write(value) for _, value in points),
    }


def curves_section(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders the curves, and the same samples as a table."""
    metrics, rows = _metric_names(snapshot.samples), {}
    for each in _listed_samples(snapshot.samples):
        name, values = f"sample-{1000 * each.seconds:.0f}", dict(each.metrics)
        rows[name] = cache(name, _CURVES.row, name, each, tuple(loss(values.get(one)) for one in metrics))
    return Section(cache("course", _curves_markup, snapshot.samples), rows)


def _curves_markup(samples: tuple[ProgressSample, ...]) -> Markup:
    made: Markup = _CURVES.section(tuple(_curves(samples)) if samples else (), _metric_names(samples))
    return made


def _curves(samples: tuple[ProgressSample, ...]) -> Iterator[dict[str, Any]]:
    unit = "step" if samples[-1].step else "second"
    at = [(each.step if unit == "step" else int(each.seconds), each) for each in samples]
    losses = [(x, each.loss) for x, each in at if each.loss is not None]
    yield curve("loss", "Loss, mean over workers", losses, loss, unit)
    rates = [(x, each.rate) for x, each in at]
    yield curve("rate", "Steps per second, in total", rates, number, unit, zero=True)
    if any(each.samples_rate for each in samples):
        speeds = [(x, each.samples_rate) for x, each in at]
        yield curve("speed", "Samples per second, in total", speeds, number, unit, zero=True)
    for index, name in enumerate(_metric_names(samples)):
        points = [(x, value) for x, each in at for known, value in each.metrics if known == name]
        yield curve(f"metric-{index}", name, points, loss, unit)


def _metric_names(samples: tuple[ProgressSample, ...]) -> tuple[str, ...]:
    """Returns the names of the metrics that workers report now."""
    return tuple(name for name, _ in samples[-1].metrics) if samples else ()


def _listed_samples(samples: tuple[ProgressSample, ...]) -> tuple[ProgressSample, ...]:
    """Returns the table's samples, newest first. All but the newest are stable until the spacing grows."""
    apart = -(-len(samples) // MOST_ROWS)
    return tuple(dict.fromkeys((*samples[-1:], *samples[:: apart or 1][::-1])))


_STALENESS = TEMPLATES.macros("staleness.html")


def staleness_section(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders a histogram."""
    return Section(cache("staleness", _STALENESS.section, bins(snapshot.staleness), snapshot.on_ring))


_WAITS = TEMPLATES.macros("waits.html")


def waits_section(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders one row per worker in the job."""
    present = snapshot.present
    longest = max((each.holding for each in present), default=0.0)
    rows = {}
    for each in present:
        name, cells = f"wait-{each.rank}", _wait_cells(each, longest)
        rows[name] = cache(name, _WAITS.row, *cells, snapshot.on_ring)
    frame = cache("waits", _WAITS.section, _waiting_ranks(snapshot), snapshot.on_ring, bool(rows))
    return Section(frame, rows)


def _waiting_ranks(snapshot: Snapshot) -> str:
    waiting = [each for each in snapshot.present if each.state == "blocked"]
    if snapshot.silent:
        silent = ", ".join(str(each.rank) for each in snapshot.silent)
        return f"Silent, so other workers may be waiting for it: rank {silent}."
    if not waiting:
        return "No worker is blocked."
    ranks = ", ".join(str(each.rank) for each in waiting)
    return f"Blocked: rank {ranks}. Slowest worker: {snapshot.report['slowest'] or 'none; all are blocked'}."


def _wait_cells(worker: WorkerSnapshot, longest: float) -> tuple[int, int, float, str]:
    """Returns a row's values, rounded so that the row is rendered only on a visible change."""
    share = worker.holding / longest if longest else 0.0
    return worker.rank, int(worker.seconds_waiting), round(20 * share) / 20, f"{worker.holding:.2f}"


_SHARDS = TEMPLATES.macros("shards.html")


def shards_section(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders one row per shard; a ring has none."""
    shown = () if snapshot.on_ring else snapshot.shards
    total = sum(each.bytes_in + each.bytes_out for each in shown) or 1
    figures = {each.index: _usage(each) for each in shown}
    heads, rows = _heads(figures.values()), {}
    for each in shown:
        share = round((each.bytes_in + each.bytes_out) / total, 3)
        cells = tuple(figures[each.index][head] for head in heads)
        rows[f"shard-{each.index}"] = cache(f"shard-{each.index}", _SHARDS.row, each, share, cells)
    return Section(cache("shards", _SHARDS.section, heads, snapshot.on_ring), rows)


SHOWN_LINES = 60
"""How many of the newest log lines the page shows."""

_LOG = TEMPLATES.macros("log.html")
_LOG_FRAME = _LOG.section()


def log_section(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders the log, newest line first."""
    newest = snapshot.entries[::-1][:SHOWN_LINES]
    rows = {}
    for each in newest:
        name, when = f"entry-{each.number}", datetime.fromtimestamp(each.time, UTC)
        rows[name] = cache(name, _LOG.row, each, when)
    return Section(_LOG_FRAME, rows)
