"""The other end of what `calibrate` measures, in its own process.

    python -m MODULE shard HOST      one shard that serves all transports
    python -m MODULE ring DIRECTORY  rank 1 of a ring of two

It prints one line when it is ready, then answers each input line with one line: `cpu` with its processor
seconds, and `TIMES NUMEL` with `done` after that many reductions. An empty line or the end of its input ends
it.
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
from hubring.workers.communicators.ring.process_group import Ring

SENDER = Sender(0, 1)
SMALL = 1024
"""Elements of key 0: 4 KB, whose transfer time is only wake-ups."""
LARGE = 1 << 20
"""Elements of each other key: 4 MiB, a slice."""
KEYS = 8
PATIENCE = 30.0
"""Limit of one operation in seconds."""


def slices() -> list[Slice]:
    """Returns one small key, then the large ones."""
    large = [Slice(key, 0, SMALL + (key - 1) * LARGE, LARGE, 0) for key in range(1, 1 + KEYS)]
    return [Slice(0, 0, 0, SMALL, 0), *large]


def bucket() -> BucketSpec:
    """Returns a bucket that is only averaged; an optimizer's step is measured without a wire."""
    return BucketSpec(0, "float32", 0, "", (TensorSpec("zeros", (SMALL + KEYS * LARGE,)),))


def open_ring(rank: int, directory: str) -> Ring:
    """Opens one of two ranks that find each other through a file in that directory."""
    store = FileStore(f"{directory}/ring", 2)
    device = torch.device("cpu")
    return Ring(rank, 2, store, backend="gloo", device=device, host="127.0.0.1", timeout=PATIENCE)


def reduce(ring: Ring, tensor: torch.Tensor, times: int) -> None:
    """Sums a tensor on the ring `times` times."""
    for _ in range(times):
        ring.run("a measurement", lambda group: group.allreduce([tensor]))


def open_shard(host: str) -> tuple[ShardLoop, dict[str, str]]:
    """Returns a shard that listens on `host`, and its address by transport; the caller must `run` it."""
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
    raise ValueError(f"a shard does not support {order!r}; expected cpu")


def main() -> None:
    """Serves until the input ends."""
    torch.set_num_threads(1)  # as in a shard
    role, argument = sys.argv[1:]
    {"shard": _serve, "ring": _reduce}[role](argument)


if __name__ == "__main__":
    main()
