"""A gradient is NaN or infinite."""

from __future__ import annotations

from tests.support.processes.cluster import SMALL, Program, await_all
from tests.system.mishaps.mishap import HOLD, Mishap, Says, Stage

FIX = "Lower the learning rate, clip gradients, .*use a torch.amp.GradScaler"


def a_spoilt_gradient(stage: Stage, *flags: str, mode: str = "bsp") -> Program:
    """Rank 1's loss is nan once; returns rank 0, which must hear of it."""
    _, address = stage.cluster.server("--workers", "2", "--once", "--mode", mode)
    spoil = ["spoil", "1", str(HOLD), "nan", "hold", str(stage.go), str(HOLD)]
    workers = stage.cluster.ranks(address, 2, *flags, SMALL, str(100 * HOLD), "16", *spoil)
    await_all(workers, f"holding at {HOLD}")
    return stage.at_once(workers[0])


REFUSED = Mishap(
    "a gradient is NaN",
    "all workers",
    Says("the gradient of rank 1", r"is not finite.* nan in \d\.\w+ \[", FIX, since=f"in step {HOLD + 1}"),
    a_spoilt_gradient,
    code=1,
)

TRAINED = Mishap(
    "a gradient is NaN, under `--aggregate`",
    "all workers",
    Says("rank 1's parameter", r"\d\.\w+ \[.*\] holds nan", FIX, since=f"after step {HOLD + 1}"),
    lambda stage: a_spoilt_gradient(stage, "--aggregate"),
    code=1,
)

GRADIENTS = [
    REFUSED,
    REFUSED.but("a gradient is NaN, under `--mode asp`", lambda stage: a_spoilt_gradient(stage, mode="asp")),
    TRAINED.but(
        "a gradient is NaN, around the ring, and `hubring.report` gets a NaN",
        lambda stage: a_spoilt_gradient(stage, "--topology", "ring"),
        program="all members",
    ),
    TRAINED,
]
