"""The machine has too little of something."""

from __future__ import annotations

from tests.support.processes.cluster import Program, mounted
from tests.system.mishaps.mishap import Mishap, Says, Stage

TINY = mounted("mount -t tmpfs -o size=256k small /dev/shm")

LOADER = """
import torch, hubring
hubring.init()
dataset = torch.utils.data.TensorDataset(torch.zeros(8, 1 << 20))
for batch in torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1):
    pass
"""


def a_loader_without_room(stage: Stage) -> Program:
    script = stage.folder / "loader.py"
    script.write_text(LOADER)
    return stage.worker(str(script), within=TINY)


MACHINE = [
    Mishap(
        "a small /dev/shm, for a DataLoader with workers",
        "the worker",
        Says("/dev/shm has 262144 bytes", "shared memory", "--shm-size=1g, or set num_workers=0"),
        a_loader_without_room,
        code=1,
    )
]
