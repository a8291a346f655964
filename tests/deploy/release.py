"""Checks that a wheel holds the programs, with all files that they read, and nothing else.

python -m tests.deploy.release dist/hubring-0.3.0-py3-none-any.whl
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
UNREAD = ("*.md", "*.proto", "protos/generate.py", "workers/bench/measured.json")
"""Files beside the sources that no installed program reads."""


def main(wheel: str) -> None:
    """Compares the names in a wheel with the files of this repository."""
    listed = ["git", "ls-files", "hubring", "ps", "workers", "protos"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [Path(name) for name in tracked if not (ROOT / name).is_symlink()]
    wanted = {file for file in files if not any(file.match(pattern) for pattern in UNREAD)}
    names = [name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name]
    held = {(ROOT / name).resolve().relative_to(ROOT) for name in names}  # `hubring/ps` is a link
    if wanted != held:
        lacks, more = sorted(map(str, wanted - held)), sorted(map(str, held - wanted))
        sys.exit(f"{wheel} lacks {lacks} and has {more} too many; see [tool.hatch.build] in pyproject.toml")


if __name__ == "__main__":
    main(sys.argv[1])
