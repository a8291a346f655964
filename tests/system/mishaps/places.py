"""A worker or a shard finds a server, and no place there."""

from __future__ import annotations

from pathlib import Path

from hubring.ps.core.types import PROTOCOL
from hubring.ps.security.keyring import make_files
from tests.support.processes.cluster import SMALL, Program
from tests.system.mishaps.mishap import HOLD, Mishap, Stage

OLDER = f"import hubring.ps.core.types\nhubring.ps.core.types.PROTOCOL = {PROTOCOL - 1}\n"


def no_token(stage: Stage) -> Program:
    _, address = stage.cluster.server("--token-file", str(stage.folder / "tokens"))
    return stage.worker("--server", address, SMALL, "5")


def another_token(stage: Stage) -> Program:
    _, address = stage.cluster.server("--token-file", str(stage.folder / "tokens"))
    other = make_files(stage.folder / "other")
    return stage.worker("--server", address, "--token-file", str(other), SMALL, "5")


def an_older_worker(stage: Stage) -> Program:
    _, address = stage.cluster.server()
    stage.happens()
    flags = ("--server", address, SMALL, "5")
    return stage.cluster.run("worker", "hubring.workers.programs.ps_worker", *flags, variables=older(stage))


def an_older_shard(stage: Stage) -> Program:
    _, address = stage.cluster.server()
    stage.happens()
    flags = ("start", "--join", address)
    return stage.cluster.run("joining", "hubring.ps.cli", *flags, variables=older(stage))


def older(stage: Stage) -> dict[str, str]:
    """What lets programs, and those that they start, be of the version before."""
    (stage.folder / "sitecustomize.py").write_text(OLDER)
    root = Path(__file__).parents[3]
    return {"PYTHONPATH": f"{stage.folder}:{root}"}


def another_job(stage: Stage) -> Program:
    """The job that refused another one goes on."""
    _, address = stage.cluster.server("--workers", "1")
    (first,) = stage.hold(address, 1)

    def goes_on() -> None:
        stage.go.touch()
        assert first.done()["steps"] == 3 * HOLD

    stage.afterwards = goes_on
    return stage.worker("--server", address, "--job", "char-lm")


def another_topology(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2")
    first = stage.cluster.worker(address, SMALL, "5")
    first.until_said("waiting for 1 of 2 workers")
    return stage.worker("--server", address, "--topology", "ring", SMALL, "5")


def another_world_size(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2")
    return stage.worker("--server", address, "--world-size", "3", SMALL, "5")


def too_few(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "3")
    stage.cluster.worker(address, SMALL, "5")
    return stage.worker("--server", address, "--timeout", "8", SMALL, "5")


def too_many(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "1")
    stage.hold(address, 1)
    return stage.worker("--server", address, SMALL, "5")


def the_same_rank_twice(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2")
    first = stage.cluster.worker(address, "--rank", "1", SMALL, "5")
    first.until_said("waiting for 1 of 2 workers")
    return stage.worker("--server", address, "--rank", "1", SMALL, "5")


def a_rank_too_high(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2")
    return stage.worker("--server", address, "--rank", "5", SMALL, "5")


def another_model(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2", "--lease", "2")
    first, second = stage.hold(address, 2)
    second.process.kill()
    first.until_said("the job continues with 1 of 2 workers")
    return stage.worker("--server", address, "--rank", "1", SMALL, "60", "24")


def a_ring_that_has_begun(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2")
    stage.hold(address, 2, "--topology", "ring")
    return stage.worker("--server", address, "--topology", "ring", SMALL, "60")


def no_values(stage: Stage) -> Program:
    """Rank 0 fails where it should give the hub its parameters."""
    _, address = stage.cluster.server("--workers", "2")
    script = stage.folder / "empty.py"
    script.write_text(
        "import time, sys, torch, hubring\nfrom pathlib import Path\nhubring.init()\n"
        "print('ready', file=sys.stderr, flush=True)\n"
        "if hubring.rank() == 0:\n"
        f"    while not Path({str(stage.go)!r}).exists(): time.sleep(0.02)\n"
        "    raise ValueError('no data')\n"
        "model = torch.nn.Linear(2, 1)\n"
        "hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
    )
    first, second = [stage.cluster.worker(address, "--rank", str(rank), str(script)) for rank in range(2)]
    first.until_said("ready")
    second.until_said("ready")
    stage.happens()
    stage.go.touch()
    return second


OLDER_WORKER = Mishap(
    "a worker of an older version",
    "the worker",
    who=f"the worker uses protocol {PROTOCOL - 1}",
    why=f"this server uses protocol {PROTOCOL}",
    fix="install the same version of Hubring on both hosts",
    code=78,
    provoke=an_older_worker,
)

PLACES = [
    Mishap(
        "a worker without a token",
        "the worker",
        who=r"the server at 127\.0\.0\.1:\d+ refused this program",
        why="it has no token",
        fix="copy the server's token file, .* and pass it with --token-file",
        code=78,
        provoke=no_token,
    ),
    Mishap(
        "a worker with a token of another server",
        "the worker",
        who=r"certificate mismatch at 127\.0\.0\.1:\d+",
        why="this token belongs to another server, or the tokens were regenerated",
        fix="copy the server's token file again, or pass --tls-ca, if the server has a certificate of your",
        code=78,
        provoke=another_token,
    ),
    OLDER_WORKER,
    OLDER_WORKER.but(
        "a host that joins with an older version",
        an_older_shard,
        program="the joining host",
        who=f"the shard uses protocol {PROTOCOL - 1}",
    ),
    Mishap(
        "the server runs another job",
        "the worker",
        who=r"this server runs job 'small\.py'",
        why="this worker belongs to job 'char-lm'",
        fix="wait until the server's job finishes, or start another server",
        code=78,
        provoke=another_job,
    ),
    Mishap(
        "the other workers use another topology",
        "the worker",
        who="the job uses --topology hub",
        why="this worker uses --topology ring",
        fix="start all workers with the same --topology",
        code=78,
        provoke=another_topology,
    ),
    Mishap(
        "another world size than the server's",
        "the worker",
        who="this worker's launcher starts 3 workers",
        why="the server expects 2",
        fix="restart the server with --workers 3",
        code=78,
        provoke=another_world_size,
    ),
    Mishap(
        "too few workers",
        "the workers that joined",
        who=r"waiting for 1 of 3 workers \(rank 2",
        since=r"waited \d+ s",
        why="not started yet",
        fix="Start them, or restart the server",
        code=1,
        provoke=too_few,
    ),
    Mishap(
        "too many workers",
        "the worker",
        who=r"rank 0 \(.* pid \d+\)",
        why="no rank is free; the job has 1 of 1 workers",
        fix="Restart the server with --workers 2, or wait until a worker leaves",
        code=78,
        provoke=too_many,
    ),
    Mishap(
        "the same rank twice",
        "the second worker",
        who=r"rank 1 \(.* pid \d+\)",
        why="already holds this rank",
        fix="start this worker with another --rank, or stop the other worker",
        code=78,
        provoke=the_same_rank_twice,
    ),
    Mishap(
        "a rank beyond the world",
        "the worker",
        who="rank 5",
        why=r"is invalid; the job has 2 workers \(ranks 0 to 1\)",
        fix="Restart the server with --workers 6 or more, or start the worker with a lower --rank",
        code=78,
        provoke=a_rank_too_high,
    ),
    Mishap(
        "a worker with another model",
        "the worker",
        who="this worker's model differs from the job's",
        why=r"0\.weight \[8, 24\]",
        fix="start all workers with the same script, arguments and flags",
        code=78,
        provoke=another_model,
    ),
    Mishap(
        "the ring has already started",
        "the worker",
        who="the job has started",
        why="no worker can join a ring",
        fix="Wait until the job finishes, or start another server",
        code=78,
        provoke=a_ring_that_has_begun,
    ),
    Mishap(
        "rank 0 fails before it sends the first parameters",
        "the other workers",
        who="rank 0 left the job",
        since="before it sent the initial values of key 0",
        why="check the log of rank 0",
        fix="then restart the job",
        code=69,
        provoke=no_values,
    ),
]
