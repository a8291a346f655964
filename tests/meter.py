"""Measures how simple the sources are: `python -m tests.meter` prints it, `tests/test_meter.py` holds it.

Code lines are lines without blanks, comments, docstrings and imports. A public class name is used twice if
two classes of the sources have it. A circle is a set of files that import each other; imports for a type
checker count, imports within functions do not.

The path of a gradient is what two workers of `ps-run -np 2` and their shard call in a warm step over shared
memory: one bucket, bsp, one push after the other. On the worker it is what the training thread calls from
zero_grad to the end of `step()`. On the shard it is what the thread of its loop calls from one step to the
next, with its sleep before each of the two pushes. A call is each time that Python enters a function,
comprehension or generator of ours. A move is a call in another file than the call before it. Nearly all steps
are equal, and the commonest one counts.

`python -m tests.meter path` prints each call of a step and of a round.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import hubring
from tests.support import traced
from tests.support.imports import FILES, ROOT, imports, statements_in

SOURCES = [*FILES.values(), *(ROOT / "deploy").rglob("*.py")]
SOURCES = sorted(path for path in SOURCES if "_pb2" not in path.name)
TESTS = sorted((ROOT / "tests").rglob("*.py"))

STEPS = 12
"""Steps to trace."""
TRACE_SECONDS = 540.0


@cache
def code_lines(path: Path) -> int:
    """Returns the number of lines without blanks, comments, docstrings and imports."""
    text = path.read_text()
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    numbers = {number for number, line in lines if line and not line.startswith("#")}
    for node in statements(text):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant(str())):
                numbers -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(numbers)


def statements(text: str) -> list[ast.AST]:
    found: list[ast.AST] = [ast.parse(text)]
    for node in found:
        found += statements_in(node)
    return found


@cache
def class_names_used_twice() -> dict[str, list[str]]:
    """Returns where the public classes of the same name are."""
    places = defaultdict(list)
    for path in SOURCES:
        for node in statements(path.read_text()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def import_circles() -> list[list[str]]:
    """Returns each set of files that reach each other by imports."""
    graph = {
        name: {found.target for found in imports(name) if found.at_start and found.target in FILES} - {name}
        for name in FILES
    }
    return [[str(FILES[name].relative_to(ROOT)) for name in circle] for circle in circles(graph)]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns each set of names that reach each other."""
    reach = {name: reached(graph, name) for name in graph}
    found = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return sorted(sorted(circle) for circle in found if circle)


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    unseen = [start]
    while unseen:
        new = graph[unseen.pop()] - seen
        seen |= new
        unseen += new
    return seen


class Call(NamedTuple):
    """One call, as `tests/support/traced/sitecustomize.py` records it."""

    began: int
    depth: int
    file: str
    function: str
    line: int


Calls = Sequence[Call]


def size(calls: Calls) -> dict[str, int]:
    """Returns the four numbers of a path."""
    return {
        "calls": len(calls),
        "functions": len({call[2:] for call in calls}),
        "files": len({call.file for call in calls}),
        "moves": sum(one.file != other.file for one, other in pairwise(calls)),
    }


def paths() -> tuple[Calls, Calls]:
    """Traces a job. Returns the commonest step of a worker, and the commonest round of a shard."""
    workers: list[Calls] = []
    others: list[Calls] = []
    for calls in traced_threads():
        (workers if any(map(is_step, calls)) else others).append(calls)
    steps = [step for calls in workers for step in steps_of(calls)]
    starts = min([call.began for call in calls if is_step(call)] for calls in workers)
    loop = max(others, key=lambda calls: sum(call.file.endswith("shard/loop.py") for call in calls))
    rounds = [[call for call in loop if began <= call.began < end] for began, end in pairwise(starts)]
    return commonest(steps), commonest(rounds)


def traced_threads() -> list[Calls]:
    """Runs the job. Returns the recorded calls of each thread of each process."""
    folder_of_tracer = str(Path(traced.__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                Path(sys.executable).with_name("ps-run"),
                *("-np", "2", "--transport", "shm", f"{folder_of_tracer}/steady.py", str(STEPS), folder),
            ],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": folder_of_tracer,
                "TRACE_FOLDER": folder,
                "TRACE_PACKAGE": str(Path(hubring.__file__).parent),
            },
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=TRACE_SECONDS,
        )
        return [
            [Call(*call) for call in json.loads(file.read_text())] for file in Path(folder).glob("*.json")
        ]


def is_step(call: Call) -> bool:
    return call.file.endswith("steady.py") and call.function == "step"


def steps_of(calls: Calls) -> Iterator[Calls]:
    """Yields the calls of each step: they are deeper than the script's function, which they follow."""
    for start in (index for index, call in enumerate(calls) if is_step(call)):
        rest = calls[start + 1 :]
        end = next(index for index, call in enumerate(rest) if call.depth <= calls[start].depth)
        yield rest[:end]


def commonest(paths: Sequence[Calls]) -> Calls:
    sizes = [tuple(size(path).values()) for path in paths]
    return paths[sizes.index(Counter(sizes).most_common(1)[0][0])]


def totals() -> dict[str, int]:
    """Returns the numbers that need no run."""
    return {
        "source files": len(SOURCES),
        "source code lines": sum(map(code_lines, SOURCES)),
        "test code lines": sum(map(code_lines, TESTS)),
        "class names used twice": len(class_names_used_twice()),
        "import circles": len(import_circles()),
    }


def print_folders() -> None:
    files: dict[str, list[int]] = defaultdict(list)
    for path in [*SOURCES, *TESTS]:
        parts = path.relative_to(ROOT).parts
        for end in range(1, len(parts) if parts[0] != "tests" else 2):
            files["/".join(parts[:end])].append(code_lines(path))
    print("code lines / files")
    for folder, lines in sorted(files.items()):
        print(f"{sum(lines):>7} {len(lines):>4}  {folder}")


def print_path(name: str, calls: Calls, every_call: bool) -> None:
    package = f"{Path(hubring.__file__).parent}/"
    print(f"\n{name}:", ", ".join(f"{count} {what}" for what, count in size(calls).items()))
    for call in calls if every_call else []:
        place = f"{call.file.removeprefix(package)}:{call.line}"
        print(f"{'  ' * (call.depth - min(each.depth for each in calls))}{call.function}  {place}")


def main() -> None:
    every_call = sys.argv[1:] == ["path"]
    if not every_call:
        print_folders()
        for name, places in class_names_used_twice().items():
            print(f"{name}: {', '.join(places)}")
        for circle in import_circles():
            print("circle:", ", ".join(circle))
        print(*(f"{count:>7} {name}" for name, count in totals().items()), sep="\n")
    worker, shard = paths()
    print_path("a step on a worker", worker, every_call)
    print_path("a round on a shard", shard, every_call)


if __name__ == "__main__":
    main()
