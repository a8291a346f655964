"""The other end of what `calibrate` measures, a process of its own.

    python -m MODULE shard HOST      one shard that serves by every transport
    python -m MODULE ring DIRECTORY  rank 1 of a ring of two

It says one line when it is ready, then answers each line that it is told with one: to `cpu`, the seconds
of processor time that it has used; to `TIMES NUMEL`, `done` once it has reduced so often. It ends by an
empty line, or with its input.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from hubring.ps.core.types import BucketSpec, Member, Sender, Slice, TensorSpec, View
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP
from hubring.ps.store.parameter_memory import HostMemory
from hubring.ps.transport.registry import open_doors
from hubring.workers.communicators.ring_process_group import Ring

SENDER = Sender(0, 1)
SMALL = 1024
"""Elements of key 0: 4 KB, whose journey is all wake-ups."""
LARGE = 1 << 20
"""Elements of each other key: 4 MiB, a slice."""
KEYS = 8
PATIENCE = 30.0
"""Seconds that one operation may take."""


def slices() -> list[Slice]:
    """One small key, then the large ones."""
    large = [Slice(key, 0, SMALL + (key - 1) * LARGE, LARGE, 0) for key in range(1, 1 + KEYS)]
    return [Slice(0, 0, 0, SMALL, 0), *large]


def bucket() -> BucketSpec:
    """Averaged alone: an optimizer's step is measured without a wire."""
    return BucketSpec(0, "float32", 0, "", (TensorSpec("zeros", (SMALL + KEYS * LARGE,)),))


def open_ring(rank: int, directory: str) -> Ring:
    """One of two ranks that meet in a file of that directory."""
    store = FileStore(f"{directory}/ring", 2)
    device = torch.device("cpu")
    return Ring(rank, 2, store, backend="gloo", device=device, host="127.0.0.1", timeout=PATIENCE)


def reduce(ring: Ring, tensor: torch.Tensor, times: int) -> None:
    """Sums a tensor around the ring so often."""
    for _ in range(times):
        ring.run("a measurement", lambda group: group.allreduce([tensor]))


def open_shard(host: str) -> tuple[ShardLoop, dict[str, str]]:
    """A shard that listens on `host`, and its address by each transport; `run` it."""
    doors = open_doors(host)
    loop = ShardLoop(BSP(), list(doors.listeners.values()), HostMemory(doors.allocate))
    loop.store.on_view(View(1, (Member(*SENDER),)))
    loop.assign(slices(), [bucket()])
    return loop, {name: listener.address for name, listener in doors.listeners.items()}


def _serve(host: str) -> None:
    loop, addresses = open_shard(host)
    threading.Thread(target=_obey, args=(json.dumps(addresses), _nothing, loop.stop), daemon=True).start()
    loop.run()


def _reduce(directory: str) -> None:
    ring = open_ring(1, directory)

    def act(order: str) -> None:
        times, numel = (int(word) for word in order.split())
        reduce(ring, torch.zeros(numel), times)

    _obey("ready", act, ring.close)


def _obey(ready: str, act: Callable[[str], None], end: Callable[[], None]) -> None:
    print(ready, flush=True)
    while line := sys.stdin.readline().strip():
        if line == "cpu":
            print(time.process_time(), flush=True)
        else:
            act(line)
            print("done", flush=True)
    end()


def _nothing(order: str) -> None:
    raise ValueError(f"a shard takes no order {order!r}")


def main() -> None:
    """Serves until the input ends."""
    torch.set_num_threads(1)  # as a shard does
    role, argument = sys.argv[1:]
    {"shard": _serve, "ring": _reduce}[role](argument)


if __name__ == "__main__":
    main()
