"""What one run does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

SHARDS = 2
MODES = ("bsp", "aggregate", "asp", "ssp", "backup")
KINDS = (*product(MODES, ("shm", "zmq", "grpc")), *3 * (("ring", "gloo"),))
MOMENTS = ("joining", "training", "training", "ending")
OF_A_RING = (*3 * ("coordinator",), "guardian", "standby of coordinator")
OF_A_HUB = (*4 * ("shard",), "standby of shard", *OF_A_RING)


@dataclass(frozen=True)
class Plan:
    """What one run does.

    Attributes:
        seed: Chooses all else.
        kind: The server's mode, `aggregate` or `ring`.
        wire: The transport.
        workers: Their number.
        target: The victim; empty in an undisturbed run, which has no standbys.
        moment: One of MOMENTS.
        delay: Part of the moment's length after which the process is killed.
        shard: The victim's number, if it is a shard or its standby.
        twice: Whether the successor of the shard is killed too, in a longer job.
    """

    seed: int
    kind: str
    wire: str
    workers: int
    target: str = ""
    moment: str = "training"
    delay: float = 0.5
    shard: int = 0
    twice: bool = False

    @classmethod
    def of(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        kind, wire = KINDS[seed % len(KINDS)]
        target = chance.choice(OF_A_RING if kind == "ring" else OF_A_HUB)
        twice = target == "shard" and chance.random() < 0.2
        moment = "training" if twice else chance.choice(MOMENTS)
        delay, shard = chance.random(), chance.randrange(SHARDS)
        return cls(seed, kind, wire, chance.choice((2, 3)), target, moment, delay, shard, twice)

    @property
    def steps(self) -> int:
        """The job's. Asynchronous modes diverge after some 200."""
        return 160 if self.twice else 60

    @property
    def pace(self) -> float:
        """Seconds of a step. A new standby needs some time."""
        return 0.06 if self.twice else 0.02

    @property
    def synchronous(self) -> bool:
        return self.kind in ("bsp", "aggregate", "ring")

    @property
    def at_hub(self) -> bool:
        """Whether the hub has the parameters, and saves them."""
        return self.kind not in ("aggregate", "ring")

    @property
    def names(self) -> list[str]:
        return [f"rank-{rank}" for rank in range(self.workers)]

    @property
    def victim(self) -> str:
        return f"{self.target} {self.shard}" if "shard" in self.target else self.target

    @property
    def failovers(self) -> int:
        """How many the kills cost."""
        return (self.target in ("coordinator", "shard")) + self.twice

    def __str__(self) -> str:
        victim = f"{self.victim}{' and its successor' * self.twice}"
        when = f"while {self.moment} +{self.delay:.2f}"
        return f"{self.kind:9} {self.wire:4} {self.workers} workers, {victim} {when}"
