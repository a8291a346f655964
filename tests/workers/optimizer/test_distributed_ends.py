"""How the wrapped optimizer begins and ends, and what goes wrong."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import nn

from hubring.ps.core.errors import DeadlineExceeded
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.local import LocalCommunicator
from tests.support.training.training_scripts import (
    assert_same,
    batches,
    build,
    loss_of,
    parameters_of,
    plain_step,
    single_server,
    wrap,
)


def test_a_late_worker_waits_for_no_broadcast() -> None:
    rank = single_server()
    rank.late = True
    rank.size = 2
    optimizer = wrap(nn.BatchNorm1d(3), rank)
    assert optimizer.completed_steps == 0


def test_steps_go_on_from_where_the_hub_stands() -> None:
    rank, model = single_server(), build()
    rank.hub.start = 40
    told: list[int] = []
    optimizer = wrap(model, rank, after_step=told.append)
    for batch in batches():
        plain_step(model, optimizer, batch)
    assert told == [41, 42, 43, 44]
    assert optimizer.completed_steps == 44


@pytest.mark.parametrize(("begun", "asks", "warned"), [(40, False, 1), (40, True, 0), (0, False, 0)])
def test_a_script_that_does_not_ask_where_its_job_goes_on_is_told_once(
    begun: int, asks: bool, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    rank, model = single_server(), build()
    rank.hub.start = begun
    optimizer = wrap(model, rank)
    if asks:
        assert optimizer.completed_steps == begun
    for batch in batches():
        plain_step(model, optimizer, batch)
    assert caplog.text.count("this is step 41 of a restarted job") == warned


def test_refresh_brings_the_hubs_newest_parameters() -> None:
    rank, model = single_server(), build()
    optimizer = wrap(model, rank)
    for values in rank.hub.values.values():
        values.fill_(0.25)
    optimizer.refresh()
    assert all(bool((parameter == 0.25).all()) for parameter in model.parameters())


class Stuck(LocalCommunicator):
    """Never finishes an exchange."""

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        return Work(f"the exchange of bucket {bucket.spec.index}")


class Noting(LocalCommunicator):
    """Notes what is handed over together."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    @contextmanager
    def together(self) -> Iterator[None]:
        self.noted.append("(")
        yield
        self.noted.append(")")

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        self.noted.append(str(bucket.spec.index))
        return super().push_pull(bucket, hyper)


@pytest.mark.parametrize(
    ("overlap", "unused", "noted"),
    [(False, False, "(012345)"), (True, False, "012345"), (True, True, "(012345)")],
)
def test_buckets_left_after_backward_are_sent_together(overlap: bool, unused: bool, noted: str) -> None:
    rank, model = Noting(), build()
    optimizer = wrap(model, rank, overlap=overlap, bucket_bytes=16)
    for batch in batches()[:3]:
        rank.noted.clear()
        optimizer.zero_grad()
        loss_of(model[:-1] if unused else model, batch).backward()
        optimizer.step()
    assert "".join(rank.noted) == noted


def test_a_step_after_the_timeout_waits_again() -> None:
    model = build()
    optimizer = wrap(model, Stuck(), timeout=0.01)
    before = parameters_of(model)
    with pytest.raises(DeadlineExceeded, match="bucket 0"):
        loss_of(model, batches()[0]).backward()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="bucket 0"):
            optimizer.step()
    assert optimizer.completed_steps == 0
    assert_same(parameters_of(model), before)


def test_a_model_is_freed_with_its_optimizer_and_goes_on_without_it() -> None:
    model, kept = build(), build()
    for one in (model, kept):
        plain_step(one, wrap(one, single_server()), batches()[0])
    weight = weakref.ref(model[0].weight)
    del model, one
    gc.collect()
    assert weight() is None
    for batch in batches():
        loss_of(kept, batch).backward()
