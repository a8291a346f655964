"""A command line, a variable or a file says what cannot be."""

from __future__ import annotations

import socket

from tests.support.processes.cluster import SMALL, Program
from tests.system.mishaps.mishap import Mishap, Says, Stage

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


SERVER = ("--server", "127.0.0.1:5555")
NCCL = (*SERVER, "--topology", "ring", "--backend", "nccl")
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def configured(stage: Stage, text: str) -> Program:
    file = stage.folder / "settings.toml"
    file.write_text(text)
    return stage.server("--config", str(file))


def at_a_taken_port(stage: Stage, flag: str) -> Program:
    taken = stage.kept.enter_context(socket.create_server(("127.0.0.1", 0)))
    return stage.command("start", "--port", "0", flag, str(taken.getsockname()[1]))


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
        Says("--sever", "No such option", "--server.*see ps-worker --help"),
        lambda stage: stage.worker("--sever", "127.0.0.1:5555"),
        code=2,
    ),
    Mishap(
        "a misspelt variable",
        "the worker",
        Says("PS_SERVR in the environment", "no such setting", r"did you mean PS_SERVER\?"),
        lambda stage: stage.worker(SMALL, "5", variables={"PS_SERVR": "127.0.0.1:5555"}),
    ),
    Mishap(
        "a settings file that is not TOML",
        "the server",
        Says(r"settings file .*settings\.toml", "is not TOML: Expected '=' after a key", "at line 2"),
        lambda stage: configured(stage, "[server]\nworkers 2\n"),
    ),
    Mishap(
        "an unknown key in a settings file",
        "the server",
        Says(r"worker in .*settings\.toml \[server\]", "no such setting", r"did you mean workers\?"),
        lambda stage: configured(stage, "[server]\nworker = 2\n"),
    ),
    Mishap(
        "settings that contradict each other",
        "the server",
        Says("--staleness 3", "requires --mode ssp, not --mode bsp", "change one of the two"),
        lambda stage: stage.server("--mode", "bsp", "--staleness", "3"),
    ),
    Mishap(
        "a missing script",
        "the worker",
        Says(r"trian\.py", "not found", "pass an existing file"),
        lambda stage: stage.worker("trian.py"),
        code=2,
    ),
    Mishap(
        "a flag and the launcher disagree on the rank",
        "the worker",
        Says("on the rank: ", "two sources disagree", "unset one of them"),
        lambda stage: stage.worker("--rank", "0", *SERVER, SMALL, "5", variables=LAUNCHED),
    ),
    Mishap(
        "a launcher starts several workers, and no server is named",
        "the worker",
        Says("the job has 2 workers", "no server is set", "pass --server HOST:PORT or set PS_SERVER"),
        lambda stage: stage.worker(SMALL, "5", variables=LAUNCHED),
    ),
    Mishap(
        "the port is taken",
        "the server",
        Says(r"cannot listen on 127\.0\.0\.1:\d+", "Address already in use", "use --port 0 for a free port"),
        lambda stage: at_a_taken_port(stage, "--port"),
    ),
    Mishap(
        "the status page's port is taken",
        "the server",
        Says("the status page cannot listen", "Address already in use", "use --page-port 0 for a free port"),
        lambda stage: at_a_taken_port(stage, "--page-port"),
    ),
    Mishap(
        "the address belongs to another machine",
        "the server",
        Says(r"cannot listen on 192\.0\.2\.1", "Cannot assign requested address", "another --host"),
        lambda stage: stage.server("--host", "192.0.2.1", "--insecure"),  # RFC 5737: of no host
    ),
    Mishap(
        "--device cuda without a GPU",
        "the server",
        Says("--device cuda", "finds no GPU on this host", "use --device cpu"),
        code=78,
        provoke=lambda stage: stage.server("--device", "cuda", variables=NO_GPU),
    ),
    Mishap(
        "--backend nccl without a GPU",
        "the worker",
        Says("--backend nccl", "needs a CUDA device, but torch finds none", "use --backend gloo"),
        lambda stage: stage.worker(*NCCL, SMALL, "5", variables=NO_GPU),
    ),
    Mishap(
        "--gpus with fewer GPUs",
        "the worker",
        Says("--gpus 2", r"torch finds 0 GPU\(s\) on this host", "add --accelerator cpu to train on the CPU"),
        lambda stage: stage.worker("--gpus", "2", *SERVER, SMALL, "5", variables=NO_GPU),
    ),
    Mishap(
        "--record in a missing folder",
        "the worker",
        Says(r"--record .*record\.jsonl", "does not exist", "create it first"),
        lambda stage: stage.worker("--record", str(stage.folder / "missing/record.jsonl"), SMALL, "5"),
    ),
    Mishap(
        "--slice-bytes is too small for the model",
        "the worker",
        Says("slices of at most 8 bytes", r"but a job has at most \d+", r"with --slice-bytes \d+"),
        lambda stage: stage.newcomer(("--slice-bytes", "8"), SMALL, "5", "90000"),
    ),
    Mishap(
        "a second backward after the gradients were sent",
        "the worker",
        Says(r"twice\.py line 8", "backward", "backward_passes_per_step"),
        a_misused_optimizer,
    ),
]
