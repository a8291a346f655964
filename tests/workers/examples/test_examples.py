"""What the examples are made of: corpus, dropout, warm-up, images, checkpoints."""

from __future__ import annotations

import ast
import gzip
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hubring
from hubring.ps.core.errors import UsageError
from hubring.workers import api
from hubring.workers.examples import checkpoint, ddp_amp, lm_ptb, mnist, mpi_patterns, ptb_corpus
from hubring.workers.examples.images import images, read_idx
from hubring.workers.runtime import context
from tests.support.training.mnist_files import idx, write_mnist


@pytest.fixture
def alone() -> Iterator[None]:
    """A worker by itself, which leaves torch's settings as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    hubring.shutdown()


def test_a_script_that_wants_to_step_cannot_say_so_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    stepping_on_the_hub: Any = SimpleNamespace(communicator=SimpleNamespace(steps_on="server"))
    monkeypatch.setattr(context, "_current", stepping_on_the_hub)
    assert context.init() is stepping_on_the_hub
    with pytest.raises(UsageError, match=r"init\(aggregate=True\) was called after"):
        hubring.init(aggregate=True)


@pytest.mark.parametrize("script", [lm_ptb, mnist, ddp_amp, mpi_patterns, checkpoint])
def test_an_example_uses_public_names_alone_and_none_of_a_topology(script: ModuleType) -> None:
    tree = ast.parse(Path(str(script.__file__)).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hubring"
    }
    assert used
    assert used <= set(api.__all__) - {"topology"}


def test_a_pattern_that_there_is_not_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        mpi_patterns.main(["reduce", "shuffle"])
    assert ended.value.code == 2
    assert "no pattern 'shuffle'; expected one of point-to-point" in capsys.readouterr().err


# The language model


def corpus(folder: Path, train: str = "a b a\nb a\n", other: str = "a c\n") -> Path:
    for part, text in (("train", train), ("valid", other), ("test", other)):
        (folder / f"ptb.{part}.txt").write_text(text)
    return folder


def test_words_are_numbered_by_how_often_they_occur_and_unknown_ones_are_alike(tmp_path: Path) -> None:
    read = ptb_corpus.read(corpus(tmp_path))
    assert read.words == 4  # a, <eos>, b, <unk>
    assert read.train.tolist() == [0, 2, 0, 1, 2, 0, 1]
    assert read.valid.tolist() == [0, 3, 1]


def test_whole_rows_have_every_word_but_the_first_guessed_once() -> None:
    stream = torch.arange(10, 33)
    text = ptb_corpus.rows(stream, 4, slice(None), whole=True)
    assert text.read.shape == (4, 6)
    guessed = text.guess[text.guess != ptb_corpus.NOTHING]
    assert guessed.tolist() == stream[1:].tolist()
    assert torch.equal(text.read[text.guess != ptb_corpus.NOTHING], stream[:-1])


def test_rows_to_train_on_are_full() -> None:
    text = ptb_corpus.rows(torch.arange(23), 4, slice(None), whole=False)
    assert text.read.tolist()[:2] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert torch.equal(text.guess, text.read + 1)


@pytest.mark.parametrize("size", [2, 4])
def test_workers_rows_are_together_those_of_one(size: int) -> None:
    stream, share = torch.arange(100), 8 // size
    parts = [
        ptb_corpus.rows(stream, 8, slice(rank * share, (rank + 1) * share), whole=True)
        for rank in range(size)
    ]
    whole = ptb_corpus.rows(stream, 8, slice(None), whole=True)
    assert torch.equal(torch.cat([part.read for part in parts]), whole.read)
    assert torch.equal(torch.cat([part.guess for part in parts]), whole.guess)


def test_workers_drop_together_what_one_drops() -> None:
    signal = torch.ones(8, 5, 3)

    def dropped(mine: slice) -> torch.Tensor:
        torch.manual_seed(0)
        return lm_ptb.SharedDropout(0.65, mine, 8)(signal[mine])

    whole = dropped(slice(0, 8))
    assert torch.equal(torch.cat([dropped(slice(0, 4)), dropped(slice(4, 8))]), whole)
    torch.testing.assert_close(whole.unique(), torch.tensor([0.0, 1 / 0.35]))


def test_an_evaluation_drops_nothing() -> None:
    drop = lm_ptb.SharedDropout(0.65, slice(0, 2), 4).eval()
    assert torch.equal(drop(torch.ones(2, 3)), torch.ones(2, 3))


def test_the_configurations_are_the_papers() -> None:
    """Hidden units, steps, dropout, initial scale, norm, decay, epoch after which it decays, epochs."""
    assert {name: tuple(config) for name, config in lm_ptb.CONFIGS.items()} == {
        "small": (200, 20, 0.0, 0.1, 5.0, 0.5, 4, 13),
        "medium": (650, 35, 0.5, 0.05, 5.0, 0.8, 6, 39),
        "large": (1500, 35, 0.65, 0.04, 10.0, 1 / 1.15, 14, 55),
    }


def test_rows_that_cannot_be_shared_are_a_usage_error_that_names_the_value(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hubring, "size", lambda: 3, raising=False)
    with pytest.raises(SystemExit) as ended:
        lm_ptb.main(["--data_path", str(corpus(tmp_path))])
    assert ended.value.code == 2
    assert "--batch_size 20 is not divisible by 3 workers" in capsys.readouterr().err


def test_a_missing_text_is_named(alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus(tmp_path) / "ptb.valid.txt").unlink()
    with pytest.raises(SystemExit):
        lm_ptb.main(["--data_path", str(tmp_path)])
    assert f"--data_path {tmp_path} has no ptb.valid.txt" in capsys.readouterr().err


def test_a_text_that_is_too_short_is_told_so(alone: None, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has 7 words, too few for --batch_size 20 rows of 20"):
        lm_ptb.main(["--data_path", str(corpus(tmp_path))])


# Digits


def test_the_learning_rate_rises_from_one_workers_to_all() -> None:
    rates = [mnist.warmth(step, factor=4, warm_up=10) for step in (0, 5, 10, 15)]
    assert rates == pytest.approx([0.25, 0.625, 1.0, 1.0])
    assert mnist.warmth(0, factor=1, warm_up=10) == 1.0
    assert mnist.warmth(0, factor=4, warm_up=0) == 1.0


def test_mnists_files_are_read_packed_or_not(tmp_path: Path) -> None:
    pictures = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pictures)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(torch.tensor([7, 3], dtype=torch.uint8)))
    train, test = images(tmp_path)
    assert train.tensors[0].shape == (2, 1, 3, 4)
    torch.testing.assert_close(train.tensors[0].flatten(), (torch.arange(24) - 0.1307 * 255) / (0.3081 * 255))
    assert test.tensors[1].tolist() == [7, 3]


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"\0\0\x08\x03", "expected an idx file"), (idx(torch.zeros(3, dtype=torch.uint8))[:-1], r"\[3\]")],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "labels").write_bytes(data)
    with pytest.raises(ValueError, match=says):
        read_idx(tmp_path, "labels", 1)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither labels nor labels\.gz"):
        read_idx(tmp_path, "labels", 1)


# Checkpoints


def test_a_state_is_unpacked_as_it_was_packed() -> None:
    model = nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    model(torch.ones(3)).sum().backward()
    adam.step()
    state = {"optimizer": adam.state_dict(), "list": [1, None, "tensor", True], "scale": 65536.0}
    back = checkpoint.unpacked(checkpoint.packed(state))
    assert checkpoint.packed(back) == checkpoint.packed(state)
    assert back["list"] == [1, None, "tensor", True]
    assert back["optimizer"]["param_groups"] == adam.state_dict()["param_groups"]
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], adam.state_dict()["state"][0]["exp_avg"])


def test_what_a_checkpoint_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="cannot hold a Linear"):
        checkpoint.packed({"model": nn.Linear(1, 1)})


def test_without_a_file_training_begins_with_epoch_1(alone: None, tmp_path: Path) -> None:
    hubring.init()
    assert checkpoint.load(None, {}) == 1
    assert checkpoint.load(tmp_path / "none", {}) == 1


def test_a_file_that_is_replaced_leaves_nothing_else(alone: None, tmp_path: Path) -> None:
    hubring.init()
    model = nn.Linear(2, 2)
    for epoch in (1, 2):
        checkpoint.save(tmp_path / "kept", {"model": model}, epoch)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert checkpoint.load(tmp_path / "kept", {"model": model}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(ddp_amp.DTYPES))
def test_mixed_precision_goes_on_in_the_same_bits(alone: None, tmp_path: Path, precision: str) -> None:
    write_mnist(tmp_path, 128)

    def run(epochs: int, file: str) -> bytes:
        flags = ["--epochs", str(epochs), "--precision", precision, "--data-dir", str(tmp_path)]
        ddp_amp.main([*flags, "--checkpoint", str(tmp_path / file)])
        hubring.shutdown()
        return (tmp_path / file).read_bytes()

    whole = run(4, "whole")
    assert run(2, "parts") != whole
    assert run(4, "parts") == whole
    held = checkpoint.unpacked(whole)
    assert set(held) == {"epoch", "model", "optimizer", "scaler"}
    assert bool(held["scaler"]) is (precision == "fp16")


def test_nodes_and_ranks_that_do_not_fit_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ddp_amp.main(["--nodes", "2", "--gpus", "1", "--nr", "2"])
    assert ended.value.code == 2
    assert "--nodes 2 --gpus 1 --nr 2" in capsys.readouterr().err
