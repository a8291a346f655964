"""The table of results: one line for each row of a setting, as text for a terminal."""

from __future__ import annotations

from hubring.ps.page.kit.figures import NOTHING, size
from hubring.workers.compare.figures import PART
from hubring.workers.compare.output.unevenness import uneven
from hubring.workers.compare.result.clock import sentence
from hubring.workers.compare.result.drift import drift
from hubring.workers.compare.result.findings import Entry, Findings, Number
from hubring.workers.compare.result.record_share import record_share
from hubring.workers.compare.result.statistics import interval_words


def columns(findings: Findings) -> list[str]:
    """Returns the heads of the columns."""
    job = findings.job
    target = "target" if job.target is None else f"{job.target:g}"
    return [
        "row",
        f"{job.samples}/s",
        "step ms",
        f"s to {target}",
        *([] if findings.asked.prices is None else ["price/epoch", f"price to {target}"]),
        "final loss",
        job.title,
        "bytes per step",
        "memory MB",
        "CPU ms",
        "exposed ms",
        "stale mean/max",
    ]


def lines(findings: Findings, setting: str) -> list[list[str]]:
    """Returns the cells of a setting's rows, in the order of `columns`; a withheld speed reads `withheld`."""
    priced = findings.asked.prices is not None
    return [_cells(each, priced=priced) for each in findings.under(setting)]


def notes(findings: Findings) -> list[str]:
    """Returns notes to print below the table; only those that concern these rows."""
    rows = {each.row for each in findings.rows}
    slept = any(each.emulated for each in findings.rows)
    priced, epochs = findings.asked.prices is not None, findings.asked.epochs is not None
    hub, ring = any(row.startswith("hub-") for row in rows), "ring" in rows
    texts = {
        _spread_note(findings.seeds): True,
        "Samples per second are means, step times medians, after warm-up.": True,
        "Emulated: workers slept for part of every step instead of computing.": slept,
        "local is one process with the whole batch and as many threads as each worker.": "local" in rows,
        "Bytes are sent plus received; the ring's are computed, 2(n-1)/n of the model each.": ring,
        "Exposed: time a step was blocked on exchange that did not overlap with compute.": hub or ring,
        "Memory and CPU are of one worker: at most, and in a step.": True,
        "Prices are of all hosts, while they train.": priced,
        "The price of an epoch is not known: set epochs in the file, or --epochs.": priced and not epochs,
        "Staleness: updates by other workers between a worker's read and its own update.": hub,
    }
    return [
        *_reasons(findings),
        *_gate(findings),
        *uneven(findings),
        *filter(None, [sentence(findings.clocks)]),
        *(note for note, concerns in texts.items() if concerns),
    ]


def _gate(findings: Findings) -> list[str]:
    """Returns how many steps the gate re-checked, what that cost, and how far rows are apart at the end."""
    gate = findings.gate
    steps = f"{gate.judged:,} of {gate.taken:,} steps"
    checked = f"Gate: {steps} were re-checked against torch's optimizer in one process."
    return [*([checked] if gate.steps else []), *filter(None, [record_share(findings), drift(gate)])]


def _spread_note(seeds: int) -> str:
    if seeds == 1:
        return "One seed: there is no interval, and any difference can be chance."
    return f"Medians over {seeds} seeds. ± is half of an interval that {interval_words(seeds)}. {PART}"


def _reasons(findings: Findings) -> list[str]:
    """Returns why rows have no speed or failed."""
    texts = []
    for each in findings.rows:
        where = f"{each.setting} {each.row}" if len(findings.setting_keys) > 1 else each.row
        texts += [f"{where}: withheld, {each.withheld}"] if each.withheld else []
        texts += [f"{where}: failed, {each.failed}"] if each.failed else []
    return texts


def _cells(entry: Entry, *, priced: bool) -> list[str]:
    return [
        f"{entry.row} (emulated)" if entry.emulated else entry.row,
        _speed(entry, "samples_per_second", ",.0f"),
        _speed(entry, "step_ms", ".2f"),
        _speed(entry, "seconds_to_target", ".2f"),
        *([_speed(entry, f"price_{part}", ".3g") for part in ("per_epoch", "to_target")] if priced else []),
        _number(entry.number("final_loss"), ".4f"),
        _number(entry.number("final_metric"), ".3f"),
        _bytes(entry),
        _number(entry.number("memory_mb"), ",.0f"),
        _speed(entry, "cpu_ms_per_step", ".2f"),
        _speed(entry, "exposed_ms", ".2f"),
        _stale(entry),
    ]


def _speed(entry: Entry, named: str, form: str) -> str:
    return "withheld" if entry.withheld else _number(entry.number(named), form)


def _number(number: Number | None, form: str) -> str:
    """Returns a median, half of its interval if at least 0.5%, and how many seeds have a value if not all."""
    if number is None:
        return NOTHING
    half = (number.high - number.low) / 2 / abs(number.median or 1.0)
    spread = f" ±{half:.0%}" if half >= 0.005 else ""
    return f"{number.median:{form}}{spread}{number.part}"


def _bytes(entry: Entry) -> str:
    both = [entry.median(f"bytes_{way}_per_step") for way in ("sent", "received")]
    known = [value for value in both if value is not None]
    return size(sum(known)) if known else NOTHING


def _stale(entry: Entry) -> str:
    mean, most = entry.number("staleness_mean"), entry.number("staleness_max")
    if mean is None or most is None:
        return NOTHING
    return f"{mean.median:.2f}/{most.most:g}"
