"""A command line, a variable or a file says what cannot be."""

from __future__ import annotations

import socket

from tests.support.processes.cluster import SMALL, Program
from tests.system.mishaps.mishap import Mishap, Stage

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def a_misspelt_flag(stage: Stage) -> Program:
    return stage.worker("--sever", "127.0.0.1:5555")


def a_misspelt_variable(stage: Stage) -> Program:
    stage.happens()
    return stage.cluster.run(
        "worker", "hubring.workers.programs.ps_worker", SMALL, "5", variables={"PS_SERVR": "127.0.0.1:5555"}
    )


def bad_toml(stage: Stage) -> Program:
    file = stage.folder / "settings.toml"
    file.write_text("[server]\nworkers 2\n")
    return stage.server("--config", str(file))


def an_unknown_key(stage: Stage) -> Program:
    file = stage.folder / "settings.toml"
    file.write_text("[server]\nworker = 2\n")
    return stage.server("--config", str(file))


def contradicting_flags(stage: Stage) -> Program:
    return stage.server("--mode", "bsp", "--staleness", "3")


def no_script(stage: Stage) -> Program:
    return stage.worker("trian.py")


def two_ranks(stage: Stage) -> Program:
    stage.happens()
    flags = ("--rank", "0", "--world-size", "2", "--server", "127.0.0.1:5555", SMALL, "5")
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    return stage.cluster.run("worker", "hubring.workers.programs.ps_worker", *flags, variables=launched)


def launched_without_a_server(stage: Stage) -> Program:
    stage.happens()
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    return stage.cluster.run("worker", "hubring.workers.programs.ps_worker", SMALL, "5", variables=launched)


def a_taken_page_port(stage: Stage) -> Program:
    taken = stage.kept.enter_context(socket.create_server(("127.0.0.1", 0)))
    return stage.server("--page-port", str(taken.getsockname()[1]))


def a_taken_port(stage: Stage) -> Program:
    taken = stage.kept.enter_context(socket.create_server(("127.0.0.1", 0)))
    stage.happens()
    return stage.cluster.run("failing", "hubring.ps.cli", "start", "--port", str(taken.getsockname()[1]))


def a_foreign_host(stage: Stage) -> Program:
    return stage.server("--host", "192.0.2.1", "--insecure")  # TEST-NET-1 (RFC 5737): nobody's


def no_gpu_for_the_server(stage: Stage) -> Program:
    stage.happens()
    return stage.cluster.run("failing", "hubring.ps.cli", "start", "--device", "cuda", variables=NO_GPU)


def no_gpu_for_the_ring(stage: Stage) -> Program:
    stage.happens()
    flags = ("--server", "127.0.0.1:5555", "--topology", "ring", "--backend", "nccl", SMALL, "5")
    return stage.cluster.run("worker", "hubring.workers.programs.ps_worker", *flags, variables=NO_GPU)


def no_folder_for_the_record(stage: Stage) -> Program:
    return stage.worker("--record", str(stage.folder / "missing" / "record.jsonl"), SMALL, "5")


def tiny_slices(stage: Stage) -> Program:
    _, address = stage.cluster.server("--workers", "1", "--slice-bytes", "8")
    stage.happens()
    return stage.cluster.worker(address, SMALL, "5", "90000")


def a_misused_optimizer(stage: Stage) -> Program:
    script = stage.folder / "twice.py"
    script.write_text(
        "import torch, hubring\nhubring.init()\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "for passes in (1, 2):\n"
        "    optimizer.zero_grad()\n"
        "    for _ in range(passes):\n"
        "        model(torch.ones(2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    _, address = stage.cluster.server("--workers", "1", "--once")
    stage.happens()
    return stage.cluster.worker(address, str(script))


SETTINGS = [
    Mishap(
        "a misspelt flag",
        "the worker",
        who="--sever",
        why="No such option",
        fix="--server.*see ps-worker --help",
        code=2,
        provoke=a_misspelt_flag,
    ),
    Mishap(
        "a misspelt variable",
        "the worker",
        who="PS_SERVR in the environment",
        why="no such setting",
        fix=r"did you mean PS_SERVER\?",
        code=78,
        provoke=a_misspelt_variable,
    ),
    Mishap(
        "a settings file that is not TOML",
        "the server",
        who=r"settings file .*settings\.toml",
        why="is not TOML: Expected '=' after a key",
        fix="at line 2",
        code=78,
        provoke=bad_toml,
    ),
    Mishap(
        "an unknown key in a settings file",
        "the server",
        who=r"worker in .*settings\.toml \[server\]",
        why="no such setting",
        fix=r"did you mean workers\?",
        code=78,
        provoke=an_unknown_key,
    ),
    Mishap(
        "settings that contradict each other",
        "the server",
        who="--staleness 3",
        why="requires --mode ssp, not --mode bsp",
        fix="change one of the two",
        code=78,
        provoke=contradicting_flags,
    ),
    Mishap(
        "a missing script",
        "the worker",
        who=r"trian\.py",
        why="not found",
        fix="pass an existing file",
        code=2,
        provoke=no_script,
    ),
    Mishap(
        "a flag and the launcher disagree on the rank",
        "the worker",
        who="on the rank: ",
        why="two sources disagree",
        fix="unset one of them",
        code=78,
        provoke=two_ranks,
    ),
    Mishap(
        "a launcher starts several workers, and no server is named",
        "the worker",
        who="the job has 2 workers",
        why="no server is set",
        fix="pass --server HOST:PORT or set PS_SERVER",
        code=78,
        provoke=launched_without_a_server,
    ),
    Mishap(
        "the port is taken",
        "the server",
        who=r"cannot listen on 127\.0\.0\.1:\d+",
        why="Address already in use",
        fix="use --port 0 for a free port",
        code=78,
        provoke=a_taken_port,
    ),
    Mishap(
        "the status page's port is taken",
        "the server",
        who=r"the status page cannot listen on 127\.0\.0\.1:\d+",
        why="Address already in use",
        fix="use --page-port 0 for a free port",
        code=78,
        provoke=a_taken_page_port,
    ),
    Mishap(
        "the address belongs to another machine",
        "the server",
        who=r"cannot listen on 192\.0\.2\.1",
        why="Cannot assign requested address",
        fix="another --host",
        code=78,
        provoke=a_foreign_host,
    ),
    Mishap(
        "--device cuda without a GPU",
        "the server",
        who="--device cuda",
        why="finds no GPU on this host",
        fix="use --device cpu",
        code=78,
        provoke=no_gpu_for_the_server,
    ),
    Mishap(
        "--backend nccl without a GPU",
        "the worker",
        who="--backend nccl",
        why="needs a CUDA device, but torch finds none on this host",
        fix="use --backend gloo",
        code=78,
        provoke=no_gpu_for_the_ring,
    ),
    Mishap(
        "--record in a missing folder",
        "the worker",
        who=r"--record .*record\.jsonl",
        why="does not exist",
        fix="create it first",
        code=78,
        provoke=no_folder_for_the_record,
    ),
    Mishap(
        "--slice-bytes is too small for the model",
        "the worker",
        who="slices of at most 8 bytes",
        why=r"into \d+ slices, but a job has at most \d+",
        fix=r"restart the server with --slice-bytes \d+",
        code=78,
        provoke=tiny_slices,
    ),
    Mishap(
        "a second backward after the gradients were sent",
        "the worker",
        who=r"twice\.py line 8",
        why="backward",
        fix="backward_passes_per_step",
        code=78,
        provoke=a_misused_optimizer,
    ),
]
