"""Scripts that ps-worker or Python runs, and how they are started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TRAIN = """
import sys, torch, hubring
hubring.init()
model = torch.nn.Linear(2, 1)
optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
hubring.report(loss=torch.tensor(0.5))
"""


PLAIN = """
import hubring
from hubring.workers.runtime import context
hubring.init()
class Session:
    step = 0; mode = "bsp"; serves = False; stop_after = 0
    def leave(self, reason, text): print(reason.name, text, flush=True)
    def await_end(self): pass
    def close(self): pass
context.current().session = Session()
"""


def started(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder to its end, without the settings of this environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**environment, **variables}, cwd=folder
    )
