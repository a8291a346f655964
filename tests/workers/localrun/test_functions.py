"""hubring.launch: a function on several workers, its results by rank, and what its errors carry."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hubring
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.process.child import Children
from hubring.workers.localrun import functions
from hubring.workers.localrun.functions import _Caller

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_pythons")]


def trained(topology: str, scale: float) -> list[tuple[int, str, float]]:
    """Trains a model by two workers, whose function is defined here and needs a value from here."""

    def train(factor: float) -> tuple[int, str, float]:
        hubring.init()
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(4, 2)).sum() * factor * (hubring.rank() + 1)).backward()
            optimizer.step()
        return hubring.rank(), hubring.topology(), model.weight.sum().item()

    return hubring.launch(train, scale, nproc=2, topology=topology, compress="fp16")


def test_results_come_by_rank_and_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(4, 2)).sum() * 0.5 * 1.5).backward()
        optimizer.step()
    expected: Any = pytest.approx(model.weight.sum().item(), abs=1e-5)
    for topology in ("hub", "ring"):
        assert trained(topology, 0.5) == [(0, topology, expected), (1, topology, expected)]


def test_an_error_carries_the_rank_and_its_traceback() -> None:
    def fails() -> None:
        hubring.init()
        if hubring.rank() == 1:
            raise LookupError("no such sample")
        hubring.barrier()

    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:\nTraceback.*in fails\n.*no such sample"):
        hubring.launch(fails)


def test_a_killed_worker_is_named_with_its_signal() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 was killed by signal 9 \(SIGKILL\) before it returned"):
        hubring.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), nproc=1)


@pytest.mark.parametrize("asked", [True, False], ids=["before it reads the call", "before it gets the call"])
def test_a_worker_that_is_killed_early_is_named(tmp_path: Path, asked: bool) -> None:
    program = tmp_path / "idle"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    with Children[_Caller]() as callers:
        idle = callers.add(_Caller(3, str(program), None))
        if asked:
            idle.ask({}, (print, (), {}))
        idle.signal(signal.SIGKILL)
        idle.wait()
        last = idle.answer if asked else partial(idle.ask, {}, (print, (), {}))
        with pytest.raises(
            RuntimeError, match=r"rank 3 was killed by signal 9 \(SIGKILL\) before it returned"
        ):
            last()


@pytest.mark.timeout(120)
def test_a_thread_that_never_ends_does_not_block_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves_a_thread() -> int:
        threading.Thread(target=threading.Event().wait).start()
        return 4

    monkeypatch.setattr(functions, "END_SECONDS", 0.1)
    assert hubring.launch(leaves_a_thread, nproc=1) == [4]


def test_a_function_that_does_not_join_returns_too() -> None:
    assert hubring.launch(lambda value: value + 1, 4, nproc=2) == [5, 5]


OUTER = {"HUBRING_LAUNCHER": "ps-run", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "HOROVOD_RANK": "1"}
OUTER |= {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "MASTER_ADDR": "no.host",
    "MASTER_PORT": "1",
}


def test_a_worker_launches_a_job_with_places_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def place() -> tuple[int, int, int]:
        hubring.init()
        torch.distributed.init_process_group("gloo")
        return hubring.rank(), hubring.size(), torch.distributed.get_rank()

    for name, text in OUTER.items():
        monkeypatch.setenv(name, text)
    assert hubring.launch(place) == [(0, 2, 0), (1, 2, 1)]


def test_settings_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean topology"):
        hubring.launch(print, topolgy="ring")
    with pytest.raises(ConfigError, match="--mode async: expected one of bsp, asp, ssp, backup"):
        hubring.launch(print, mode="async")
    with pytest.raises(UsageError, match="nproc=0: expected at least 1"):
        hubring.launch(print, nproc=0)


def test_a_group_of_torch_in_the_function_is_the_hubs_if_asked() -> None:
    def sum_ranks() -> tuple[float, str]:
        torch.distributed.init_process_group("gloo")
        total = torch.tensor(float(torch.distributed.get_rank() + 1))
        torch.distributed.all_reduce(total)
        return total.item(), torch.distributed.get_backend()

    assert hubring.launch(sum_ranks) == [(3.0, "gloo")] * 2
    assert hubring.launch(sum_ranks, as_gloo=True) == [(3.0, "hubring")] * 2
