"""All mishaps, and `deploy/MISHAPS.md`: what was really said of each.

    python -m tests.system.mishaps.table

provokes every one of them, some minutes long, and writes the page anew.
"""

from __future__ import annotations

import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes.cluster import Cluster
from tests.system.mishaps.checkpoints import CHECKPOINTS
from tests.system.mishaps.gradients import GRADIENTS
from tests.system.mishaps.losses import LOSSES
from tests.system.mishaps.machine import MACHINE
from tests.system.mishaps.mishap import Mishap, Stage
from tests.system.mishaps.places import PLACES
from tests.system.mishaps.reaching import REACHING
from tests.system.mishaps.settings import SETTINGS

PAGE = Path(__file__).parents[3] / "deploy" / "MISHAPS.md"

SECTIONS: Mapping[str, list[Mishap]] = {
    "Nobody there": REACHING,
    "No place in the job": PLACES,
    "Settings": SETTINGS,
    "Losses": LOSSES,
    "Checkpoints": CHECKPOINTS,
    "Gradients": GRADIENTS,
    "The machine": MACHINE,
}
MISHAPS = [mishap for section in SECTIONS.values() for mishap in section]

HEAD = """# What is told when something goes wrong

Nobody waits without a sentence. Of each of these mistakes and mishaps the one who waits is told within 15
seconds who is at fault, since when, why, and what to do; at once, where nothing has to be waited for. The
last column is the exit code of the program that tells it; with 0 it goes on, and came to its end later.

This page is made by the tests: each row is what a real program said when the mishap was provoked, with host
names, folders, addresses, numbers of processes, seconds and the like made `HOST`, `DIR` or `N`.
`python -m tests.system.mishaps.table` makes it anew, and tests/system/test_mishaps.py fails where a program
says something else.
"""
COLUMNS = "| what goes wrong | who is told | what it says | code |\n| --- | --- | --- | ---: |\n"


def row(mishap: Mishap, sentence: str) -> str:
    """The line of the table that this sentence, blanked, makes."""
    cells = [mishap.name, mishap.told, sentence.replace("|", "\\|"), str(mishap.code)]
    return f"| {' | '.join(cells)} |"


def blanked(sentence: str, folder: Path) -> str:
    """A sentence without what differs from run to run and from machine to machine."""
    sentence = sentence.rpartition(" | ")[2].removeprefix("WARNING: ").removeprefix("ERROR: ")
    sentence = re.sub(r"^ps-(worker|server): (shard \d+ refused: )?", "", sentence)
    sentence = sentence.replace(str(folder), "DIR").replace(socket.gethostname(), "HOST")
    for pattern, blank in BLANKS:
        sentence = re.sub(pattern, blank, sentence)
    return sentence


BLANKS = [
    (r"\b(127\.0\.0\.1|localhost):\d{4,5}\b", "HOST:PORT"),
    (r"--port \d+", "--port PORT"),
    (r"pid \d+", "pid N"),
    (r"\.writing-\d+", ".writing-N"),
    (r"\d+(\.\d+)? s\b", "N s"),
    (r"\d+ bytes", "N bytes"),
    (r"protocol \d+, but this server uses protocol \d+", "protocol N, but this server uses protocol M"),
    (r"N bytes, expected \d+", "N bytes, expected N"),
    (r"\bstep=?\s?\d+", "step N"),
    (r"line \d+\)", "line N)"),
    (r" \([A-Z_]{5,}: .*?\)(?=[;.,]|$)", ""),  # gRPC's own words
    (r"/torch_\w+", "/torch_N"),
    (r" \(a build without CUDA\)", ""),
    (r"-inf in", "inf in"),
    (r"[\w./-]*/?DIR", "DIR"),
]
"""Patterns, in order, and what takes their place."""


def page(rows: Mapping[tuple[str, str], str]) -> str:
    """The whole page; `rows` are by name and by who is told."""
    parts = [HEAD]
    for title, mishaps in SECTIONS.items():
        lines = "\n".join(rows[mishap.name, mishap.told] for mishap in mishaps)
        parts.append(f"## {title}\n\n{COLUMNS}{lines}\n")
    return "\n".join(parts)


def rows_of(text: str) -> dict[tuple[str, str], str]:
    """The rows of a page, by name and by who is told."""
    rows = [line for line in text.splitlines() if line.startswith("| ") and line not in COLUMNS]
    cells = [line.removeprefix("| ").split(" | ") for line in rows]
    return {(name, told): line for line, (name, told, *_) in zip(rows, cells, strict=True)}


def play(mishap: Mishap, folder: Path) -> str:
    """Provokes one mishap in a folder; returns the row that it makes.

    Raises:
        AssertionError: It was not told, too late, or with another exit code.
    """
    cluster = Cluster(folder)
    try:
        return row(mishap, blanked(Stage(cluster).play(mishap), folder))
    finally:
        cluster.end()


def main() -> None:
    """Writes the page."""
    rows = {}
    for mishap in MISHAPS:
        with tempfile.TemporaryDirectory() as folder:
            rows[mishap.name, mishap.told] = play(mishap, Path(folder))
        print(rows[mishap.name, mishap.told], file=sys.stderr, flush=True)
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
