"""A worker or a shard finds a server, and no place there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hubring.ps.core.types import PROTOCOL
from hubring.ps.security.keyring import make_files
from tests.support.processes.cluster import SMALL, Program
from tests.system.mishaps.mishap import HOLD, Mishap, Says, Stage

TWO = ("--workers", "2")
RANK = ("--rank", "1")
OLDER = f"import hubring.ps.core.types\nhubring.ps.core.types.PROTOCOL = {PROTOCOL - 1}\n"


def with_tokens(stage: Stage, *flags: str) -> Program:
    return stage.newcomer(("--token-file", str(stage.folder / "tokens")), *flags, SMALL, "5")


def another_token(stage: Stage) -> Program:
    return with_tokens(stage, "--token-file", str(make_files(stage.folder / "other")))


def an_older_shard(stage: Stage) -> Program:
    _, address = stage.cluster.server()
    return stage.command("start", "--join", address, variables=older(stage))


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


def a_second_worker(stage: Stage, first: Sequence[str], *flags: str) -> Program:
    """Another one waits for it."""
    _, address = stage.cluster.server("--workers", "2")
    stage.cluster.worker(address, *first, SMALL, "5").until_said("waiting for 1 of 2 workers")
    return stage.worker("--server", address, *flags, SMALL, "5")


def too_few(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "3")
    stage.cluster.worker(address, SMALL, "5").until_said("waiting for 2 of 3 workers")
    return stage.worker("--server", address, "--timeout", "8", SMALL, "5")


def too_many(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "1")
    stage.hold(address, 1)
    return stage.worker("--server", address, SMALL, "5")


def another_model(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "2")
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
    first, second = stage.cluster.ranks(address, 2, str(script))
    first.until_said("ready")
    second.until_said("ready")
    return stage.at_once(second)


OLDER_WORKER = Mishap(
    "a worker of an older version",
    "the worker",
    Says(f"worker uses protocol {PROTOCOL - 1}", f"server uses protocol {PROTOCOL}", "the same version"),
    lambda stage: stage.newcomer((), SMALL, "5", variables=older(stage)),
)

PLACES = [
    Mishap(
        "a worker without a token",
        "the worker",
        Says("refused this program", "it has no token", "copy the server's token file, .*--token-file"),
        with_tokens,
    ),
    Mishap(
        "a worker with a token of another server",
        "the worker",
        Says("certificate mismatch", "belongs to another server", "copy .* again, or pass --tls-ca"),
        another_token,
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
        Says(r"runs job 'small\.py'", "belongs to job 'char-lm'", "or start another server"),
        another_job,
    ),
    Mishap(
        "the other workers use another topology, and no --local",
        "the worker",
        Says("job uses --topology hub;", "worker uses --topology ring --local", "with the same flags"),
        lambda stage: a_second_worker(stage, (), "--topology", "ring", "--local"),
    ),
    Mishap(
        "a hub on a server without shards",
        "the worker",
        Says("this server has no shards", "only serves a ring", "restart it with --shards 1 or more"),
        lambda stage: stage.newcomer(("--workers", "1", "--shards", "0"), SMALL, "5"),
    ),
    Mishap(
        "another world size than the server's",
        "the worker",
        Says("launcher starts 3 workers", "the server expects 2", "restart .* with --workers 3"),
        lambda stage: stage.newcomer(TWO, "--world-size", "3", SMALL, "5"),
    ),
    Mishap(
        "too few workers",
        "the workers that joined",
        Says(r"for 1 of 3 workers \(rank 2", "not started yet", "Start them", since=r"waited \d+ s"),
        too_few,
        code=1,
    ),
    Mishap(
        "too many workers",
        "the worker",
        Says(r"rank 0 \(.* pid \d+\)", "no rank is free", "Restart the server with --workers 2"),
        too_many,
    ),
    Mishap(
        "the same rank twice",
        "the second worker",
        Says(r"rank 1 \(.* pid \d+\)", "already holds this rank", "with another --rank"),
        lambda stage: a_second_worker(stage, RANK, *RANK),
    ),
    Mishap(
        "a rank beyond the world",
        "the worker",
        Says("rank 5", r"the job has 2 workers \(ranks 0 to 1\)", "with --workers 6 or more"),
        lambda stage: stage.newcomer(TWO, "--rank", "5", SMALL, "5"),
    ),
    Mishap(
        "a worker with another model",
        "the worker",
        Says("this worker's model differs", r"0\.weight \[8, 24\]", "with the same script"),
        another_model,
    ),
    Mishap(
        "the ring has already started",
        "the worker",
        Says("the job has started", "no worker can join a ring", "Wait until the job finishes"),
        a_ring_that_has_begun,
    ),
    Mishap(
        "rank 0 fails before it sends the first parameters",
        "the other workers",
        Says("rank 0 left the job", "log of rank 0", "restart the job", since="before it sent the initial"),
        no_values,
        code=69,
    ),
]
