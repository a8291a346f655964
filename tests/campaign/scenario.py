"""What one seed chooses: the job, the fault, its victim and its moment."""

from __future__ import annotations

import random

from msgspec import Struct
from msgspec.structs import replace

STEPS = 40
"""Steps of each job."""
LAST_HOLD = 32
"""Before this step all workers wait until the fault has fired and the processes were measured."""
LEASE = 2.0
TIMEOUT = 10.0
"""Seconds of `--timeout`: how long a worker may wait for an exchange."""

MODES = ("bsp", "ssp", "asp", "backup", "ring")
KILL_MODES = (*MODES, "aggregate")
WIRES = ("shm", "zmq", "grpc")
SIGNALS = ("kill", "stop", "freeze", "terminate")
"""A stop is shorter than the lease, a freeze is longer."""
TAMPERINGS = ("cut", "delay", "drop", "duplicate", "truncate", "corrupt")
STANDBYS = 1 / 3
"""The part of the hub's jobs in which each shard and the coordinator have a standby."""
GARBAGE_EVERY = 20
"""One of so many seeds sends garbage to all ports."""
DISK = ("full disk", "torn file", "flipped bit")

STOPPED_SECONDS = {"stop": 1.0, "freeze": 7.0}
"""A freeze also exceeds the 4 s that a worker waits for a server that it cannot reach."""
UNTIL_RESUMED = {
    ("kill", "shard"),
    ("freeze", "shard"),
    ("kill", "coordinator"),
    ("freeze", "coordinator"),
    ("terminate", "coordinator"),
    ("freeze", "guarded coordinator"),  # only a dead one is replaced
    ("terminate", "guardian"),
    ("kill", "member"),
    ("freeze", "member"),
    ("terminate", "member"),
    ("torn file", "disk"),
    ("flipped bit", "disk"),
}
"""These end the job; a second job resumes from the checkpoints of the first."""
FAILOVERS = {("kill", "guarded shard"), ("freeze", "guarded shard"), ("kill", "guarded coordinator")}
"""After these a standby takes the victim's place."""


class Scenario(Struct, frozen=True):
    """One run.

    Attributes:
        seed: Chooses everything else.
        mode: A mode of the hub, `aggregate` or `ring`.
        wire: The transport between workers and shards; `gloo` in a ring.
        workers: The number of workers.
        shards: The number of shard processes; 0 in a ring.
        standby: Whether the server runs with `--standby 1`.
        fault: What goes wrong; `none` for the undisturbed run.
        place: Where: worker, member, shard, coordinator, data, control, ports or disk. With standbys: guarded
            shard, guarded coordinator, standby, or guardian, the process that a person started.
        victim: The rank of the worker, the number of the shard, or whose standby it is: the shard's with this
            number, or the coordinator's after all of these.
        moment: `between`: all workers hold. `within`: the victim holds, the others are in the step.
            `flowing`: no worker holds.
        step: The step of that moment.
        pace: Seconds that each worker sleeps in a step.
        replaced: Whether a lost worker is replaced.
        toward: The end of a connection that receives the changed chunk: `server` or `worker`.
        smallest: Bytes of the smallest chunk that is changed.
        seconds: How long a delay takes.
        kills: Whether `drawn_kill` chose it.
        also: The name of another process that is killed at the same moment; empty for none.
        starts: Whether `drawn_start` chose it: a worker ends before the first step, and is replaced.
    """

    seed: int
    mode: str
    wire: str
    workers: int
    shards: int
    standby: bool
    fault: str
    place: str
    victim: int
    moment: str
    step: int
    pace: float
    replaced: bool
    toward: str
    smallest: int
    seconds: float
    kills: bool = False
    also: str = ""
    starts: bool = False

    @property
    def ring(self) -> bool:
        return self.mode == "ring"

    @property
    def synchronous(self) -> bool:
        """Whether the final parameters do not depend on the order of messages."""
        return self.mode in ("bsp", "aggregate", "ring")

    @property
    def at_hub(self) -> bool:
        """Whether the hub has the parameters, and saves them."""
        return self.mode not in ("aggregate", "ring")

    @property
    def resumes(self) -> bool:
        return (self.fault, self.place) in UNTIL_RESUMED and not self.starts

    @property
    def damages(self) -> bool:
        """Whether the newest checkpoint is damaged after the first job."""
        return self.fault in ("torn file", "flipped bit")

    @property
    def fails_over(self) -> bool:
        return (self.fault, self.place) in FAILOVERS

    @property
    def loses_a_worker(self) -> bool:
        """Whether one worker ends early and the others continue."""
        return self.place == "worker" and self.fault in ("kill", "freeze", "terminate")

    @property
    def holders(self) -> list[int]:
        """The ranks that hold at `step`."""
        everyone = list(range(self.workers))
        holder = self.victim if self.place in ("worker", "member", "data", "control") else 0
        return {"between": everyone, "within": [holder], "flowing": []}[self.moment]

    @property
    def first_rank(self) -> int:
        """The rank whose progress decides when the fault fires."""
        return (self.holders or [0])[0]

    @property
    def target(self) -> str:
        """The process that a signal goes to, by its name in `Job.processes`."""
        served = [*(f"shard {number}" for number in range(self.shards)), "coordinator"]
        match self.place:
            case "worker" | "member":
                return f"rank-{self.victim}-1"
            case "shard" | "guarded shard":
                return served[self.victim]
            case "standby":
                return f"standby of {served[self.victim]}"
            case "guarded coordinator":
                return "coordinator"
        return "server-1"

    def __str__(self) -> str:
        numbered = ("worker", "member", "shard", "guarded shard", "data", "control")
        where = f"{self.place} {self.victim}" if self.place in numbered else self.place
        where = self.target if self.place == "standby" else where
        size = f"{self.workers} workers" + (f", {self.shards} shards" if self.shards else "")
        size += " with standbys" if self.standby else ""
        where += f" and {self.also}" if self.also else ""
        return f"{self.mode} {self.wire}, {size}: {self.fault} at {where}, {self.moment} step {self.step}"


def faults(mode: str, wire: str, standby: bool) -> list[tuple[str, str]]:
    """Returns the faults that a job of this kind can have, each with its place."""
    processes = ["member", "coordinator"] if mode == "ring" else ["worker", "shard", "coordinator"]
    if standby:
        of_a_hub = [] if mode == "ring" else ["worker", "guarded shard"]
        processes = [*of_a_hub, "guarded coordinator", "standby", "guardian"]
    found = [(fault, place) for place in processes for fault in SIGNALS]
    found += [(fault, "control") for fault in TAMPERINGS]
    if wire in ("zmq", "grpc"):
        found += [(fault, "data") for fault in TAMPERINGS]
    if mode != "ring":
        found += [(fault, "disk") for fault in DISK if not (standby and (fault, "disk") in UNTIL_RESUMED)]
    return found


def drawn(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    draw = random.Random(seed)
    mode = draw.choice(MODES)
    wire = "gloo" if mode == "ring" else draw.choice(WIRES)
    workers = 3 if mode == "backup" else draw.choice((2, 3))
    shards = 0 if mode == "ring" else draw.choice((1, 2))
    standby = mode != "ring" and draw.random() < STANDBYS
    fault, place = draw.choice(faults(mode, wire, standby))
    if seed % GARBAGE_EVERY == 0:
        fault, place = "garbage", "ports"
    victims = {"shard": shards, "guarded shard": shards, "standby": shards + 1}.get(place, workers)
    moment = draw.choice(("between", "within", "flowing"))
    paces = (0.04,) if place == "disk" else (0.02,) if moment == "flowing" else (0.0, 0.02)
    return Scenario(
        seed,
        mode,
        wire,
        workers,
        shards,
        standby,
        fault,
        place,
        victim=draw.randrange(victims),
        moment=moment,
        step=draw.randrange(12, 25),
        pace=draw.choice(paces),
        replaced=draw.random() < 0.5,
        toward=draw.choice(("server", "worker")),
        smallest=draw.choice((1, 1000)) if place == "data" else draw.choice((1, 40)),
        seconds=draw.choice((0.05, 0.5, 1.5)),
    )


def drawn_kill(seed: int) -> Scenario:
    """Returns a scenario in which one process of a server with standbys is killed, in any kind of job."""
    draw = random.Random(seed)
    mode = KILL_MODES[seed % len(KILL_MODES)]
    wire = "gloo" if mode == "ring" else draw.choice(WIRES)
    workers = 3 if mode == "backup" else draw.choice((2, 3))
    shards = 0 if mode == "ring" else draw.choice((1, 2))
    processes = [place for fault, place in faults(mode, wire, standby=True) if fault == "kill"]
    place = draw.choice([place for place in processes if place != "worker"])
    victim = draw.randrange({"guarded shard": shards, "standby": shards + 1}.get(place, 1))
    job = replace(drawn(seed), mode=mode, wire=wire, workers=workers, shards=shards, standby=True)
    kill = replace(job, fault="kill", place=place, victim=victim, pace=0.02, kills=True)
    if not shards or draw.random() < 0.5:
        return kill
    number = draw.randrange(shards)
    others = ["coordinator", "standby of coordinator", "server-1"]
    if kill.target in others:
        others = [f"shard {number}", f"standby of shard {number}"]
    return replace(kill, also=draw.choice(others))


IN_INIT, BEFORE_OPTIMIZER, BEFORE_STEP = -2, -1, 0
"""Where a worker ends before the first step: alone in `init()`, before its optimizer, or after that."""


def drawn_start(seed: int) -> Scenario:
    """Returns a scenario in which a worker ends before the first step, in any kind of job.

    Only where all take steps together is it waited for after the set-up. A ring has connected by then.
    """
    draw = random.Random(seed)
    job = drawn_kill(seed)
    steps = [IN_INIT, BEFORE_OPTIMIZER, *[BEFORE_STEP] * (job.synchronous and not job.ring)]
    step = draw.choice(steps)
    fault = draw.choice(("kill", "terminate")) if step == IN_INIT else "kill"
    victim = draw.randrange(job.workers)
    job = replace(
        job, standby=draw.random() < STANDBYS and not job.ring, kills=False, also="", moment="within"
    )
    return replace(job, fault=fault, place="worker", victim=victim, step=step, starts=True)


def undisturbed(like: Scenario) -> Scenario:
    """Returns the run without a fault whose result a synchronous scenario must have."""
    wire, shards = ("gloo", 0) if like.ring else ("shm", 1)
    calm = replace(example(like.mode, "none", "disk"), wire=wire, shards=shards, workers=like.workers)
    return replace(calm, seed=-1, victim=0, moment="flowing", step=12, smallest=1, seconds=0.0)


def example(mode: str = "bsp", fault: str = "cut", place: str = "data") -> Scenario:
    """Returns a scenario for tests."""
    standby = place in ("guarded shard", "guarded coordinator", "standby", "guardian")
    return Scenario(
        7, mode, "zmq", 2, 1, standby, fault, place, 1, "between", 16, 0.0, False, "server", 1, 0.5
    )
