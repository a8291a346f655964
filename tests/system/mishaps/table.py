"""All mishaps, and `deploy/MISHAPS.md`, which shows the message of each.

    python -m tests.system.mishaps.table

provokes all of them, which takes some minutes, and writes the page.
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
    "Reaching the server": REACHING,
    "Joining the job": PLACES,
    "Settings": SETTINGS,
    "Lost processes": LOSSES,
    "Checkpoints": CHECKPOINTS,
    "Gradients": GRADIENTS,
    "Machine": MACHINE,
}
MISHAPS = [mishap for section in SECTIONS.values() for mishap in section]

HEAD = """# Error messages by mistake and mishap

Each row was provoked in real programs; [Troubleshooting](TROUBLESHOOTING.md) is sorted by symptom. Waiting
programs report the cause, here within 15 seconds, and one that is stopped or cut off after its lease: 90 s by
default (`--lease`), 8 s here. The last column is the exit code of the program that prints the message; 0
means that it continued and finished. `HOST`, `DIR` and `N` replace host names, folders, addresses, process
ids and times, and `(LINE)` the line of the script, such as `(train.py line 12)`.

`python -m tests.system.mishaps.table` makes the page; tests/system/test_mishaps.py checks it.
"""
COLUMNS = "| what goes wrong | who prints it | message | exit code |\n| --- | --- | --- | ---: |\n"


def row(mishap: Mishap, message: str) -> str:
    """Returns the row of the table for a message."""
    cells = [mishap.name, mishap.program, message.replace("|", "\\|"), str(mishap.code)]
    return f"| {' | '.join(cells)} |"


def blanked(message: str, folder: Path) -> str:
    """Returns a message without what differs between runs and machines."""
    message = message.rpartition(" | ")[2].removeprefix("WARNING: ").removeprefix("ERROR: ")
    message = re.sub(r"^ps-(worker|server): (shard \d+ refused: )?", "", message)
    message = message.replace(str(folder), "DIR").replace(socket.gethostname(), "HOST")
    for pattern, blank in BLANKS:
        message = re.sub(pattern, blank, message)
    return message


BLANKS = [
    (r"\b(127\.0\.0\.1|localhost):\d{4,5}\b", "HOST:PORT"),
    (r"--port [1-9]\d*", "--port PORT"),
    (r"pid \d+", "pid N"),
    (r"\.writing-\d+", ".writing-N"),
    (r"\d+(\.\d+)? s\b", "N s"),
    (r"\d+ bytes", "N bytes"),
    (r"protocol \d+, but this server uses protocol \d+", "protocol N, but this server uses protocol M"),
    (r"N bytes, expected \d+", "N bytes, expected N"),
    (r"\bstep=?\s?\d+", "step N"),
    (r"\(\w+\.py line \d+\)", "(LINE)"),
    (r" \([A-Z_]{5,}: .*?\)(?=[;.,]|$)", ""),  # gRPC's own words
    (r"/torch_\w+", "/torch_N"),
    (r" \(a build without CUDA\)", ""),
    (r"-inf in", "inf in"),
    (r"[\w./-]*/?DIR", "DIR"),
]
"""Patterns, in order, and their replacements."""


def page(rows: Mapping[tuple[str, str], str]) -> str:
    """Returns the page; `rows` are by name and program."""
    parts = [HEAD]
    for title, mishaps in SECTIONS.items():
        lines = "\n".join(rows[mishap.name, mishap.program] for mishap in mishaps)
        parts.append(f"## {title}\n\n{COLUMNS}{lines}\n")
    return "\n".join(parts)


def rows_of(text: str) -> dict[tuple[str, str], str]:
    """Returns the rows of a page, by name and program."""
    rows = [line for line in text.splitlines() if line.startswith("| ") and line not in COLUMNS]
    cells = [line.removeprefix("| ").split(" | ") for line in rows]
    return {(name, program): line for line, (name, program, *_) in zip(rows, cells, strict=True)}


def play(mishap: Mishap, cluster: Cluster) -> str:
    """Provokes one mishap and returns its row.

    Raises:
        AssertionError: The message is missing or late, or the exit code differs.
    """
    return row(mishap, blanked(Stage(cluster).play(mishap), cluster.folder))


def main() -> None:
    """Writes the page."""
    rows = {}
    for mishap in MISHAPS:
        with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
            rows[mishap.name, mishap.program] = play(mishap, cluster)
        print(rows[mishap.name, mishap.program], file=sys.stderr, flush=True)
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
