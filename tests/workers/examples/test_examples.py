"""What the examples are made of: corpus, dropout, warm-up, images, checkpoints."""

from __future__ import annotations

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
from hubring.workers.examples import checkpoint, ddp_amp, lm_ptb, mnist, mpi_patterns
from hubring.workers.examples.mnist import load_images, read_idx
from hubring.workers.runtime import context
from tests.support.training.mnist_files import idx


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


@pytest.mark.parametrize(
    ("script", "words", "told"),
    [
        (mpi_patterns, "reduce shuffle", "no pattern 'shuffle'; expected one of point-to-point"),
        (lm_ptb, "--data_path {} --batch_size 20", "--batch_size 20 is not divisible by 3 workers"),
        (lm_ptb, "--data_path {} --batch_size 21", "--data_path {} has no ptb.valid.txt"),
        (ddp_amp, "--nodes 2 --gpus 1 --nr 2", "--nodes 2 --gpus 1 --nr 2"),
    ],
)
def test_a_usage_error_names_the_value(
    alone: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: ModuleType,
    words: str,
    told: str,
) -> None:
    (corpus(tmp_path) / "ptb.valid.txt").unlink()
    monkeypatch.setattr(hubring, "size", lambda: 3, raising=False)
    with pytest.raises(SystemExit) as ended:
        script.main(words.format(tmp_path).split())
    assert ended.value.code == 2
    assert told.format(tmp_path) in capsys.readouterr().err


# The language model


def corpus(folder: Path, train: str = "a b a\nb a\n", other: str = "a c\n") -> Path:
    for part, text in (("train", train), ("valid", other), ("test", other)):
        (folder / f"ptb.{part}.txt").write_text(text)
    return folder


def test_words_are_numbered_by_how_often_they_occur_and_unknown_ones_are_alike(tmp_path: Path) -> None:
    read = lm_ptb.read(corpus(tmp_path))
    assert read.words == 4  # a, <eos>, b, <unk>
    assert read.train.tolist() == [0, 2, 0, 1, 2, 0, 1]
    assert read.valid.tolist() == [0, 3, 1]


def test_whole_rows_have_every_word_but_the_first_guessed_once() -> None:
    stream = torch.arange(10, 33)
    text = lm_ptb.rows(stream, 4, slice(None), whole=True)
    assert text.read.shape == (4, 6)
    guessed = text.guess[text.guess != lm_ptb.NOTHING]
    assert guessed.tolist() == stream[1:].tolist()
    assert torch.equal(text.read[text.guess != lm_ptb.NOTHING], stream[:-1])


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
    train, test = load_images(tmp_path)
    assert train.tensors[0].shape == (2, 1, 3, 4)
    torch.testing.assert_close(train.tensors[0].flatten(), (torch.arange(24) - 0.1307 * 255) / (0.3081 * 255))
    assert test.tensors[1].tolist() == [7, 3]


def test_a_file_that_is_missing_or_is_not_what_its_name_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither labels nor labels\.gz"):
        read_idx(tmp_path, "labels", 1)
    short = idx(torch.zeros(3, dtype=torch.uint8))[:-1]
    for data, says in ((b"\0\0\x08\x03", "expected an idx file"), (short, r"\[3\]")):
        (tmp_path / "labels").write_bytes(data)
        with pytest.raises(ValueError, match=says):
            read_idx(tmp_path, "labels", 1)


# Checkpoints


def test_a_value_that_a_checkpoint_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="cannot hold a Linear"):
        checkpoint.packed({"model": nn.Linear(1, 1)})


def test_a_file_that_is_replaced_leaves_nothing_else(alone: None, tmp_path: Path) -> None:
    hubring.init()
    model = nn.Linear(2, 2)
    for epoch in (1, 2):
        checkpoint.save(tmp_path / "kept", {"model": model}, epoch)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert checkpoint.load(tmp_path / "kept", {"model": model}) == 3
