"""The page: one HTML file without external files, scripts or network access.

Its first screen is the answer in one sentence, one chart and a table of three columns, fastest first.
Here too is what to trust: the gate, the noise, and everything that is needed to run the experiment again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from hubring.ps.page.kit.figures import NOTHING, digits, percent
from hubring.ps.page.kit.templating import Templates, style_sheet
from hubring.workers.compare.decide.decision import SPEED, sound
from hubring.workers.compare.decide.ratio import EVEN, ratio
from hubring.workers.compare.findings import Findings, Pair, RowResult, StepCheck
from hubring.workers.compare.plan import experiment_file
from hubring.workers.compare.plan.row import EVERY
from hubring.workers.compare.plan.setting import legend, words
from hubring.workers.compare.run.timeline import clock_sentence
from hubring.workers.compare.show.figures import drift, record_share, trust
from hubring.workers.compare.show.material import Label, MarkedWord, NumberTable, PageContent
from hubring.workers.compare.show.progress import accuracy, loss, staleness
from hubring.workers.compare.show.scaling import predictions, scaling
from hubring.workers.compare.show.speed import bandwidth, bar, breakdown, numbers, reach, throughput
from hubring.workers.compare.statistics import CONFIDENCE, ENOUGH, Load, MeasurementNoise

HEADS = ("row", "compared with", "setting", "seed", "difference", "allowed", "in", "at the end", "result")
WORDS = ("compared with", "setting", "in", "result")
STEP_HEADS = ("row", "setting", "seed", "steps", "re-checked", "result", "what is wrong")
STEP_WORDS = ("setting", "result", "what is wrong")


def gate(material: PageContent) -> dict[str, Any]:
    """Returns the answer and every pair."""
    judged = material.findings.gate
    lines = [_line(pair) for pair in sorted(judged.pairs, key=lambda each: each.passed)]
    pairs = NumberTable("All pairs of runs that were compared", HEADS, lines, WORDS)
    checked = [_step_line(each) for each in sorted(judged.steps, key=lambda each: each.passed)]
    steps = NumberTable("All runs whose steps were re-checked", STEP_HEADS, checked, STEP_WORDS)
    advice = [each.advice for each in judged.pairs] + [each.advice for each in judged.steps]
    return {
        "title": "Do the rows agree, and is every step right?",
        "judged": judged,
        "withheld": [each for each in material.findings.rows if each.withheld is not None],
        "pairs": pairs,
        "steps": steps,
        "advice": list(dict.fromkeys(filter(None, advice))),
        "drift": drift(judged),
        "cost": record_share(material.findings),
        "conditions": "; ".join(map(": ".join, material.findings.conditions.items())),
    }


def _line(pair: Pair) -> list[str | MarkedWord]:
    seed = "" if pair.seed is None else str(pair.seed)
    allowed = f"{pair.limit:g}" if pair.limit else "nothing"
    result = MarkedWord(("by right" if pair.advice else "agrees") if pair.passed else "differs", pair.passed)
    found, final = (f"{float(each):.2g}" for each in (pair.difference, pair.final))
    return [pair.second, pair.first, pair.setting, seed, found, allowed, pair.tensor, final, result]


def _step_line(each: StepCheck) -> list[str | MarkedWord]:
    result = MarkedWord("right" if each.passed else "wrong", each.passed)
    wrong = f"step {each.step}: {each.fault}" if each.step else each.fault
    counts = [f"{number:,}" for number in (each.steps, each.judged)]
    return [each.row, each.setting, str(each.seed), *counts, result, wrong or each.unjudged]


def noise(material: PageContent) -> dict[str, Any]:
    """Returns what other programs did on the machine, and the spread of repeats."""
    found = material.findings.noise
    lines = [[row, NOTHING if share is None else percent(share)] for row, share in found.spread.items()]
    heads = ("row", "spread of the step time")
    return {
        "title": "How noisy was the machine?",
        "answer": MarkedWord(found.summary, found.quiet),
        "load": _load(material),
        "said": found.said,
        "repeat": _repeat(found),
        "spread": NumberTable("Range of a row's repeats, relative to their median", heads, lines),
    }


def _repeat(found: MeasurementNoise) -> str:
    """Returns by how much two runs of the same row differ."""
    if found.repeat is None:
        return ""
    ratios = ", ".join(f"{each:.2f}" for each in found.repeat.ratios)
    return (
        f"{found.repeat.row} ran twice with each seed. Its second run was {ratios} times as fast as its"
        f" first, so this report calls no row faster by less than a factor of {max(EVEN, found.floor):.2f}."
    )


def _load(material: PageContent) -> str:
    noise, texts = material.findings.noise, []
    loads = noise.load, noise.foreign, noise.stolen, noise.stalled
    load, foreign, stolen, stalled = (each or Load() for each in loads)
    if foreign.median is not None and foreign.max is not None:
        texts.append(f"Other programs used {percent(foreign.median)} of its time in the median run,")
        texts.append(f"{percent(foreign.max)} at most.")
    if stolen.max:
        texts.append(f"Its hypervisor gave up to {percent(stolen.max)} to other machines.")
    if stalled.max:
        texts.append(f"Programs waited for memory during up to {percent(stalled.max)} of a run.")
    if load.median is None or load.max is None:
        texts.append("Its load was not recorded.")
    else:
        texts.append(f"1-minute load: median {digits(load.median, 2)}, at most {digits(load.max, 2)}.")
    return " ".join(texts)


def repeat(material: PageContent) -> dict[str, Any]:
    """Returns command, experiment, machine, versions, seeds, and the programs of each run."""
    findings = material.findings
    lines = [[name, str(value)] for name, value in _flat(findings.machine).items()]
    programs = ("\n".join((f"# {run}", *lines)) for run, lines in findings.commands.items())
    return {
        "title": "Run the experiment again",
        "seeds": sorted({seed for each in findings.rows for seed in each.seeds}),
        "command": findings.command,
        "experiment": experiment_file.to_toml(findings.experiment),
        "machine": NumberTable("Machine and versions", ("property", "value"), lines, words=("value",)),
        "clocks": clock_sentence(findings.clocks),
        "programs": "\n\n".join(programs),
        "settings": legend(findings.settings),
    }


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Joins nested names with spaces."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        whole = f"{before}{name}"
        found |= _flat(value, f"{whole} ") if isinstance(value, Mapping) else {whole: value}
    return found


def sentences(material: PageContent) -> dict[str, Any] | None:
    """Returns the whole verdict; None if there is none."""
    said = material.findings.verdict
    return {"title": "The results in words", "sentences": said} if said else None


SECTIONS: Mapping[str, tuple[str, Callable[[PageContent], Mapping[str, Any] | None]]] = {
    "words": ("In words", sentences),
    "gate": ("Gate", gate),
    "accuracy": ("Progress by time", accuracy),
    "loss": ("Progress by samples", loss),
    "throughput": ("Throughput", throughput),
    "breakdown": ("Step time", breakdown),
    "staleness": ("Staleness", staleness),
    "scaling": ("Scaling", scaling),
    "predictions": ("Predictions", predictions),
    "bandwidth": ("Bandwidth", bandwidth),
    "numbers": ("All numbers", numbers),
    "noise": ("Noise", noise),
    "repeat": ("Run again", repeat),
}
"""In page order: id, name in the list of contents, and the function for its content.

A section's template is named after its id.
"""

_TEMPLATES = Templates(__package__)


def page(findings: Findings) -> str:
    """Returns the report of an experiment as an HTML document.

    Args:
        findings: The result of `decode`, without the speeds of withheld rows.
    """
    material = PageContent.of(findings)
    made = [(name, title, make(material)) for name, (title, make) in SECTIONS.items()]
    return _TEMPLATES.render(
        "report.html",
        style=Markup(style_sheet(__package__)),  # noqa: S704 - ours
        material=material,
        first=first(material),
        sections=[each for each in made if each[2] is not None],
        absent=[title.lower() for _, title, section in made if section is None],
    )


def first(material: PageContent) -> dict[str, Any]:
    """Returns the first screen, with the rows of the first setting."""
    findings, panel = material.findings, material.panels[0]
    base = next((each for each in panel.entries if each.row == "ring"), panel.entries[0])
    entries = sorted(panel.entries, key=lambda entry: entry.median(SPEED) or 0.0, reverse=True)
    bars = [bar(material, entry)._replace(label=_explained(material, entry)) for entry in entries]
    against = f"times {base.row}"
    speed, settings = material.figures[SPEED], len(findings.setting_keys)
    title = panel.title if settings == 1 else f"{panel.title} (the first of {settings} settings)"
    lines = [[entry.row, speed.interval(entry.number(SPEED)), _against(entry, base)] for entry in entries]
    return {
        "answer": findings.answer or next(iter(findings.verdict), "No verdict for this experiment."),
        "title": title,
        "bars": [each for each in bars if each.length],
        "reach": reach(bars),
        "table": NumberTable(_caption(title, findings.seeds, against), ["row", speed.head, against], lines),
        "byline": byline(material),
        "trust": trust(findings),
    }


def byline(material: PageContent) -> str:
    """Returns what was run, in one line."""
    findings = material.findings
    seeds = "one seed" if findings.seeds == 1 else f"{findings.seeds} seeds"
    rows, settings = len(findings.row_names), findings.setting_keys
    where = words(findings.setting(settings[0])) if len(settings) == 1 else f"{len(settings)} settings"
    parts = [material.job.name, f"{rows} way{'s' if rows != 1 else ''} to train", where, seeds]
    return " · ".join(parts)


def _explained(material: PageContent, entry: RowResult) -> Label:
    """Returns a row's name, with what it does and emulates."""
    label = material.label(entry)
    about = EVERY[entry.row].about if entry.row in EVERY else None
    return label._replace(beside="; ".join(filter(None, [about, label.beside])) or None)


def _caption(title: str, seeds: int, against: str) -> str:
    """Returns what the speeds and their intervals are."""
    if seeds == 1:
        return f"Speed with {title}, and one seed"
    interval = "range" if seeds < ENOUGH else f"{CONFIDENCE:.0%} interval"
    return (
        f"Speed with {title}: median of {seeds} seeds (whiskers: {interval}); {against}: geometric mean of"
        f" the seeds' own ratios ({CONFIDENCE:.0%} interval)"
    )


def _against(entry: RowResult, base: RowResult) -> str:
    """Returns a row's speed divided by that of the base row."""
    mine, theirs = entry.number(SPEED), base.number(SPEED)
    if mine is None or theirs is None or not (sound(entry) and sound(base)):
        return NOTHING
    if entry.disturbed or base.disturbed:
        return "not decided"
    found = ratio(mine.values, theirs.values)
    return NOTHING if found is None else str(found)
