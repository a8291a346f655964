"""Emulated machines: each has its own host name, boot id and wall clock. They need root and a C compiler.

A time namespace would not do: it shifts only the clocks that no timeline compares between machines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.support.needs import needs

BECOME = 'hostname "$0" && mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && exec "$@"'

NEED_MACHINES = [
    *needs(shutil.which("cc"), "C compiler", "apt-get install gcc libc6-dev"),
    pytest.mark.skipif(os.geteuid() != 0, reason="emulated machines need root"),
]
"""Marks of a test with emulated machines."""


def machine(name: str, folder: Path, ahead: int = 0) -> list[str]:
    """Returns the prefix of a command that runs on such a machine, in the started process itself.

    Args:
        name: Its host name.
        folder: Holds its boot id and its clock.
        ahead: Seconds by which its wall clock is ahead of this machine's.
    """
    boot = folder / f"boot id of {name}"
    boot.write_text(f"{uuid.uuid4()}\n")
    prefix = ["unshare", "--mount", "--uts", "sh", "-c", BECOME, name, str(boot)]
    if ahead:
        clock = folder / f"clock-of-{name}.so"
        source = Path(__file__).with_name("clock_ahead.c")
        subprocess.run(["cc", "-shared", "-fPIC", f"-DAHEAD={ahead}", "-o", clock, source], check=True)
        prefix += ["env", f"LD_PRELOAD={clock}"]
    return prefix
