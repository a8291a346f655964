"""The examples as their users run them: processes, on the hub and around the ring."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.cluster import Cluster
from tests.support.training.mnist_files import write_mnist

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "workers" / "examples"
WORDS = 30
WITHIN = 0.001
"""One per cent is what is asked for; masks and clipping alike, only rounding is left, and that grows."""


def text(lines: int, seed: int) -> str:
    """Lines of nine words, each of which leaves three for the next."""
    draw, word, made = random.Random(seed), 0, []
    for _ in range(lines):
        line = []
        for _ in range(9):
            word = (3 * word + 1 + draw.randrange(3)) % WORDS
            line.append(f"w{word}")
        made.append(f" {' '.join(line)} \n")
    return "".join(made)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for part, lines in (("train", 300), ("valid", 41), ("test", 37)):
        (tmp_path / f"ptb.{part}.txt").write_text(text(lines, seed=lines))
    return tmp_path


def pair(cluster: Cluster, topology: str, script: str, *arguments: str) -> list[dict[str, Any]]:
    """The results of two workers on a server of their own, in rank order."""
    name = f"server{len(cluster.programs)}"
    server, address = cluster.server("--workers", "2", "--once", name=name)
    flags = ["--topology", topology, str(EXAMPLES / script), *arguments]
    results = [worker.done() for worker in cluster.ranks(address, 2, *flags)]
    server.done()
    return results


@pytest.mark.parametrize(
    ("topology", "config", "epochs"),
    [("hub", "small", 5), pytest.param("ring", "medium", 1, marks=pytest.mark.full)],
)
def test_the_language_models_perplexity_is_that_of_one_process(
    cluster: Cluster, corpus: Path, topology: str, config: str, epochs: int
) -> None:
    flags = ["--config", config, "--data_path", str(corpus), "--epochs", str(epochs)]
    alone = cluster.run("alone", "hubring.workers.programs.ps_worker", str(EXAMPLES / "lm_ptb.py"), *flags)
    expected = alone.done()["metrics"]
    first, second = pair(cluster, topology, "lm_ptb.py", *flags)
    assert first["metrics"] == second["metrics"]
    for part in ("train_perplexity", "valid_perplexity", "test_perplexity"):
        assert first["metrics"][part] == pytest.approx(expected[part], rel=WITHIN)
    assert config != "small" or expected["test_perplexity"] < WORDS
    assert f"Test Perplexity: {expected['test_perplexity']:.3f}" in alone.out.read_text()


def test_rank_0_alone_can_evaluate_the_language_model_as_in_texars_script(
    cluster: Cluster, corpus: Path
) -> None:
    flags = ["--data_path", str(corpus), "--epochs", "1", "--config"]
    all_do = pair(cluster, "hub", "lm_ptb.py", *flags, "small")[0]["metrics"]
    first, second = pair(cluster, "hub", "lm_ptb.py", *flags, "config_small", "--evaluate_on", "rank0")
    assert first["metrics"] == pytest.approx(all_do, rel=WITHIN)
    assert second["metrics"].keys() == {"train_perplexity"}


@pytest.mark.full
@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_digits_are_learnt_and_a_checkpoint_is_gone_on_from(
    cluster: Cluster, tmp_path: Path, topology: str
) -> None:
    def run(epochs: int, file: str) -> dict[str, Any]:
        flags = ["--epochs", str(epochs), "--checkpoint", str(tmp_path / file)]
        first, second = pair(cluster, topology, "mnist.py", *flags)
        assert first["metrics"] == second["metrics"]
        return first["metrics"]

    whole = run(4, "whole")
    assert whole["test_accuracy"] > 0.9
    run(2, "parts")
    assert run(4, "parts") == whole
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize(("topology", "precision"), [("hub", "fp16"), ("ring", "bf16")])
def test_nodes_times_gpus_train_in_mixed_precision_and_go_on_in_the_same_bits(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str, precision: str
) -> None:
    _, address = cluster.server("--workers", "2")
    monkeypatch.setenv("PS_SERVER", address)
    monkeypatch.setenv("PS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PS_TOPOLOGY", topology)
    write_mnist(tmp_path, 256)

    place = ["--nodes", "1", "--gpus", "2", "--nr", "0"]
    as_launcher = ["hubring.workers.examples.ddp_amp", *place]
    # What the launcher becomes. It starts faster here, since it is a fork, and its workers too.
    as_worker = ["hubring.workers.programs.ps_worker", *place, str(EXAMPLES / "ddp_amp.py")]

    def run(start: list[str], epochs: int, file: str) -> bytes:
        arguments = ["--epochs", str(epochs), "--precision", precision, "--data-dir", str(tmp_path)]
        flags = [*start, *arguments, "--checkpoint", str(tmp_path / file)]
        launcher = cluster.run(f"launcher{len(cluster.programs)}", *flags)
        assert launcher.wait() == 0, launcher.said()
        assert f"Epoch [{epochs}/{epochs}]" in launcher.out.read_text()
        return (tmp_path / file).read_bytes()

    whole = run(as_launcher, 2, "whole")
    assert run(as_worker, 1, "parts") != whole
    assert run(as_worker, 2, "parts") == whole


@pytest.mark.full
def test_two_nodes_of_one_process_are_one_job(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = cluster.server("--workers", "2", "--once")
    monkeypatch.setenv("PS_SERVER", address)
    monkeypatch.setenv("PS_ACCELERATOR", "cpu")
    flags = ["--nodes", "2", "--gpus", "1", "--epochs", "1", "--batch-size", "128"]
    nodes = [
        cluster.run(f"node{nr}", "hubring.workers.examples.ddp_amp", *flags, "--nr", str(nr))
        for nr in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0]
    assert server.done()["finished"] == [0, 1]
    assert "Epoch [1/1]" in nodes[0].out.read_text()


@pytest.mark.parametrize("topology", ["hub", pytest.param("ring", marks=pytest.mark.full)])
def test_patterns_print_what_the_tutorials_print_and_horovod_gives(cluster: Cluster, topology: str) -> None:
    pair(cluster, topology, "mpi_patterns.py")
    said = {}
    for program in cluster.programs[1:]:
        lines = program.out.read_text().splitlines()
        said[program.result()["rank"]] = [line for line in lines if line.startswith("Rank")]
    first = ["has data 1.0", "started sending", *["has data 1.0"] * 3]
    second = ["has data 1.0", "started receiving", *["has data 1.0"] * 2]
    first += ["has data [1.0, 2.0]", *["has data 2.0"] * 2]
    second += ["has data 2.0"] * 2
    horovod = ["allreduce: 1.0", "broadcast: 1.0", "allgather: [0.0, 1.0]"]
    for rank, patterns in enumerate((first, second)):
        assert said[rank] == [f"Rank {rank} {words}" for words in (*patterns, *horovod)]
