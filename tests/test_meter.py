"""The sources and the path of a gradient stay as simple as they are: a bound rises only for a new feature.

`pytest -rP tests/test_meter.py` prints what is measured, `python -m tests.meter` the files behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests import meter
from tests.meter import Call


class Bound(NamedTuple):
    """The largest number allowed, and how to get below it."""

    most: int
    advice: str


SHORTER = "let the caller do what only it needs; `python -m tests.meter path` prints each call"
NEARER = "move what one step uses into fewer files; `python -m tests.meter path` prints each call"

BOUNDS = {
    "source files": Bound(427, "move what only one file uses into that file"),
    "source code lines": Bound(45879, "remove as many lines as the change adds"),
    "test code lines": Bound(44695, "remove the tests of what another test claims"),
    "class names used twice": Bound(
        0, "choose a name that says which class it is, or give a reason in REASONS"
    ),
    "import circles": Bound(0, "move what both files use into one of them, or into a third"),
    "worker calls": Bound(183, SHORTER),
    "worker files": Bound(29, NEARER),
    "worker moves": Bound(112, NEARER),
    "shard calls": Bound(107, SHORTER),
    "shard files": Bound(15, NEARER),
    "shard moves": Bound(45, NEARER),
}
"""Lower a bound with the change that makes it possible."""

REASONS = {"Compressor": "one of them is Horovod's public name"}
"""Why a class name may be used twice."""
MOST_REASONS = 10


def check(found: dict[str, int]) -> None:
    print(*(f"{count:>7} of {BOUNDS[name].most:>6} {name}" for name, count in found.items()), sep="\n")
    over = [
        f"{name}: {count}, but at most {BOUNDS[name].most} are allowed: {BOUNDS[name].advice}"
        for name, count in found.items()
        if count > BOUNDS[name].most
    ]
    assert not over, "\n".join(over)


@pytest.mark.slow
def test_sources_and_tests_grow_in_no_number() -> None:
    twice = meter.class_names_used_twice()
    assert set(REASONS) <= set(twice), "remove the reasons of names that are used once"
    assert len(REASONS) <= MOST_REASONS
    found = meter.totals()
    check({**found, "class names used twice": len(twice) - len(REASONS)})


@pytest.mark.slow
@pytest.mark.timeout(meter.TRACE_SECONDS + 60)
def test_path_of_a_gradient_grows_in_no_number() -> None:
    worker, shard = meter.paths()
    sizes = {"worker": meter.size(worker), "shard": meter.size(shard)}
    check({f"{who} {what}": sizes[who][what] for who in sizes for what in ("calls", "files", "moves")})


def test_code_lines_are_without_blanks_comments_docstrings_and_imports(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        '"""Doc."""\n\nfrom os import (\n    path,\n)\n# why\nx = """a\nb"""  # what\n"""Of x."""\n'
    )
    assert meter.code_lines(file) == 2


def test_circle_is_what_reaches_itself() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert meter.circles(graph) == [["b", "c"]]


def test_move_is_a_call_in_another_file_than_the_call_before() -> None:
    calls = [
        Call(0, 0, "a", "f", 1),
        Call(1, 1, "b", "g", 1),
        Call(2, 1, "b", "g", 1),
        Call(3, 0, "a", "h", 9),
    ]
    assert meter.size(calls) == {"calls": 4, "functions": 3, "files": 2, "moves": 2}


def test_step_is_what_the_script_calls_in_it() -> None:
    functions = [
        (0, "main"),
        (1, "step"),
        (2, "zero_grad"),
        (3, "reset"),
        (2, "step"),
        (1, "pause"),
        (1, "step"),
    ]
    calls = [Call(0, depth, "steady.py" if depth < 2 else "ours.py", name, 1) for depth, name in functions]
    assert [[call.function for call in step] for step in meter.steps_of([*calls, calls[5]])] == [
        ["zero_grad", "reset", "step"],
        [],
    ]
