"""A worker, a shard or the server is lost, or does not come on, in the midst of training."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

from hubring.ps.core.errors import RESTART_ALL, RESTART_JOB
from tests.support.processes.cluster import SMALL, Program, await_all
from tests.system.mishaps.mishap import HOLD, Mishap, Says, Stage

RANK_0, RANK_1 = [rf"rank {rank} \(.* pid \d+\)" for rank in range(2)]
SILENT = r"sent no heartbeat for \d+\.\d s"
STEP = r"at about step \d+"
LEASE = ("--lease", "8")
"""Shorter than the default, which is made for busy machines."""


def two_held(stage: Stage, *flags: str, topology: str = "hub") -> list[Program]:
    _, address = stage.cluster.server("--workers", "2", "--once", *LEASE, *flags)
    return stage.hold(address, 2, "--topology", topology)


def a_killed_worker(stage: Stage, *flags: str, topology: str = "hub") -> Program:
    first, second = two_held(stage, *flags, topology=topology)
    second.process.kill()
    return stage.at_once(first)


def a_worker_that_is_killed_early(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2", "--once")
    script = stage.folder / "small.py"
    script.write_text(Path(SMALL).read_text().replace("hubring.init()", "hubring.init(); time.sleep(1000)"))
    first = stage.cluster.worker(address, "--rank", "0", SMALL, "5")
    second = stage.cluster.worker(address, "--rank", "1", str(script), "5")
    second.until_said("rank 1 of 2, hub in mode")
    second.process.kill()
    stage.afterwards = lambda: stage.cluster.worker(address, "--rank", "1", SMALL, "5")
    return stage.at_once(first)


def a_stopped_worker(stage: Stage, topology: str = "hub") -> Program:
    first, second = two_held(stage, topology=topology)
    second.process.send_signal(signal.SIGSTOP)
    return stage.at_once(first)


def a_worker_that_was_frozen(stage: Stage) -> Program:
    first, second = two_held(stage)
    second.process.send_signal(signal.SIGSTOP)
    first.until_said("the job continues with 1 of 2 workers")
    second.process.send_signal(signal.SIGCONT)
    return stage.at_once(second)


def a_failing_script(stage: Stage, *, own: bool) -> Program:
    _, address = stage.cluster.server("--workers", "2", "--once")
    script = stage.folder / "small.py"
    script.write_text(
        Path(SMALL).read_text().replace("loss.backward()", f"loss.backward(); 1 / (step < {HOLD})")
    )
    words = [SMALL, str(2 * HOLD), "16", "hold", str(stage.go), "1"]
    good = stage.cluster.worker(address, "--rank", "0", *words)
    bad = stage.cluster.worker(address, "--rank", "1", str(script), str(2 * HOLD))
    good.until_said("holding at 1")
    return stage.at_once(bad if own else good)


def a_worker_that_does_not_come_on(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2", "--once")
    first = stage.cluster.worker(address, "--rank", "0", SMALL, str(2 * HOLD))
    script = [SMALL, str(2 * HOLD), "16", "hold", str(stage.go), str(HOLD)]
    second = stage.cluster.worker(address, "--rank", "1", *script)
    second.until_said(f"holding at {HOLD}")
    stage.happens()
    stage.afterwards = stage.go.touch
    return first


def fewer_batches(stage: Stage, *flags: str) -> Program:
    """Rank 0 has fewer batches than rank 1; returns rank 1."""
    _, address = stage.cluster.server("--workers", "2", "--once")
    words = ("16", "hold", str(stage.go), "1")
    ranks = [("--rank", str(rank), *flags, SMALL, str((rank + 1) * HOLD), *words) for rank in range(2)]
    first, second = [stage.cluster.worker(address, *rank) for rank in ranks]
    await_all((first, second), "holding at 1")
    return stage.at_once(second)


def a_killed_shard(stage: Stage, *, told: str) -> Program:
    server, address = stage.cluster.server("--workers", "1", "--once")
    (worker,) = stage.hold(address, 1)
    os.kill(shard_of(server), signal.SIGKILL)
    return stage.at_once(worker if told == "worker" else server)


def a_stopped_shard(stage: Stage) -> Program:
    server, address = stage.cluster.server("--workers", "1", "--once", *LEASE)
    (worker,) = stage.hold(address, 1)
    shard = shard_of(server)
    os.kill(shard, signal.SIGSTOP)
    stage.kept.callback(partial(resume, shard))
    return stage.at_once(worker)


def a_shard_beside_a_worker(stage: Stage) -> Program:
    flags = ("--colocate", "--slice-bytes", "128")  # else one shard alone has all of so small a model
    _, address = stage.cluster.server("--workers", "2", "--once", *flags)
    first, second = stage.hold(address, 2)
    os.kill(shard_of(second), signal.SIGKILL)
    return stage.at_once(first)


def a_lost_host(stage: Stage) -> Program:
    server, address = stage.cluster.server("--workers", "1", "--once", "--slice-bytes", "128")
    joined = stage.cluster.run("joined", "hubring.ps.cli", "start", "--join", address)
    server.until_said("shard 1 (")
    (worker,) = stage.hold(address, 1)
    shard = shard_of(joined)
    joined.process.kill()
    os.kill(shard, signal.SIGKILL)
    return stage.at_once(worker)


def a_signal_to_the_server(stage: Stage, how: signal.Signals, *flags: str) -> Program:
    server, address = stage.cluster.server("--workers", "1", "--once", *flags)
    worker = stage.run(address)
    stage.happens()
    server.process.send_signal(how)
    return worker


def resume(pid: int) -> None:
    with suppress(ProcessLookupError):  # the server has killed it
        os.kill(pid, signal.SIGCONT)


def shard_of(program: Program) -> int:
    (shard,) = program.children("hubring.ps.shard.process")
    return shard


KILLED = Mishap(
    "a worker is killed",
    "the other workers",
    Says(RANK_1, "killed, .*continues with 1 of 2", "start one with --rank 1", since=SILENT),
    a_killed_worker,
    code=0,
)

FEWER = Mishap(
    "a rank has fewer batches than the others, under `--aggregate`",
    "the other workers",
    Says(RANK_0, f"can take step {HOLD + 1}", "uneven=True", since=f"finished after {HOLD} steps"),
    lambda stage: fewer_batches(stage, "--aggregate"),
)

MEMBER_KILLED = Mishap(
    "a member of the ring is killed",
    "the other members",
    Says(RANK_1, "killed, .*a ring cannot continue", "Restart the job", since=SILENT),
    lambda stage: a_killed_worker(stage, topology="ring"),
    code=69,
)

SHARD_KILLED = Mishap(
    "a shard is killed",
    "the workers",
    Says(r"a shard process \(pid \d+\)", "was killed by signal 9", RESTART_ALL, since=STEP),
    lambda stage: a_killed_shard(stage, told="worker"),
    code=69,
)

SHARD_STOPPED = Mishap(
    "a shard is stopped (SIGSTOP)",
    "the workers",
    Says(r"shard 0 \(.* pid \d+\)", "its part of the parameters is lost", RESTART_ALL, since=SILENT),
    a_stopped_shard,
    code=69,
)

SERVER_KILLED = Mishap(
    "the server is killed",
    "the workers",
    Says(r"the server at 127\.0\.0\.1:\d+", "network is down", RESTART_ALL, since=r"answered for \d+\.\d s"),
    lambda stage: a_signal_to_the_server(stage, signal.SIGKILL, *LEASE),
    code=69,
)

LOSSES = [
    KILLED,
    Mishap(
        "a worker is killed, under `--on-loss wait`",
        "the other workers",
        Says(RANK_1, "with --on-loss wait the job cannot continue", RESTART_JOB, since=SILENT),
        lambda stage: a_killed_worker(stage, "--on-loss", "wait"),
        code=69,
    ),
    KILLED.but("a worker is stopped (SIGSTOP)", a_stopped_worker),
    KILLED.but(
        "a worker is killed before the workers have exchanged anything",
        a_worker_that_is_killed_early,
        why=r"waiting for 1 of 2 workers \(rank 1 not started yet\)",
    ),
    Mishap(
        "a stopped worker continues (SIGCONT)",
        "that worker",
        Says(f"{RANK_1} is not a member", "lease: 8 s", "Restart the worker to rejoin", since=SILENT),
        a_worker_that_was_frozen,
        code=75,
    ),
    Mishap(
        "a training script fails",
        "that worker",
        Says("ZeroDivisionError", "division by zero", ""),
        lambda stage: a_failing_script(stage, own=True),
        code=1,
    ),
    Mishap(
        "a training script fails",
        "the other workers",
        Says(RANK_1, "division by zero; the job continues with 1 of 2", "start one with --rank 1"),
        lambda stage: a_failing_script(stage, own=False),
        code=0,
    ),
    Mishap(
        "a worker does not reach its next step",
        "the other workers",
        Says(f"the slowest is {RANK_1}", "or hangs", "see its log", since=r"for 1\d s at step \d+"),
        a_worker_that_does_not_come_on,
        code=0,
    ),
    FEWER.but(
        "a rank has fewer batches than the others",
        fewer_batches,
        why="the other ranks go on without it",
        code=0,
    ),
    FEWER,
    FEWER.but(
        "a rank has fewer batches than the others, around the ring",
        lambda stage: fewer_batches(stage, "--topology", "ring"),
        program="the other members",
    ),
    MEMBER_KILLED,
    MEMBER_KILLED.but(
        "a member of the ring is stopped (SIGSTOP)", lambda stage: a_stopped_worker(stage, topology="ring")
    ),
    SHARD_KILLED,
    SHARD_KILLED.but(
        "a shard is killed", lambda stage: a_killed_shard(stage, told="server"), program="the server"
    ),
    SHARD_STOPPED,
    Mishap(
        "a worker's shard is killed, under `--colocate`",
        "the other workers",
        Says(r"shard 1 \(rank 1's, ", "was killed by signal 9", RESTART_JOB, since=STEP),
        a_shard_beside_a_worker,
        code=69,
    ),
    SHARD_STOPPED.but("a host that joined with shards is lost", a_lost_host, who=r"shard 1 \(.* pid \d+\)"),
    SERVER_KILLED,
    SERVER_KILLED.but(
        "the server is stopped (SIGSTOP)", lambda stage: a_signal_to_the_server(stage, signal.SIGSTOP, *LEASE)
    ),
    Mishap(
        "the server is asked to stop (SIGTERM)",
        "the workers",
        Says("the server was asked to stop", "workers stop", "restart the", since="after this step"),
        lambda stage: a_signal_to_the_server(
            stage, signal.SIGTERM, "--checkpoint-dir", str(stage.folder / "saved")
        ),
        code=75,
    ),
]
