"""What the wrapped optimizer exchanges, and how much at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer import parameters
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.training_scripts import SMALL, build, number_of_buckets, single_server, wrap


def kinds() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model of two groups, one of them in two dtypes."""
    model = build()
    model[4].to(torch.float64)
    weights = [layer.weight for layer in (model[0], model[2], model[4])]
    biases = [layer.bias for layer in (model[0], model[2])]
    return model, torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default size of a bucket is `SMALL` bytes, so that the test model has several."""
    monkeypatch.setattr(parameters, "BUCKET_BYTES", SMALL)


@pytest.mark.usefixtures("small")
def test_a_hub_without_overlap_gets_one_bucket_a_kind() -> None:
    model, inner = kinds()
    optimizer = wrap(model, single_server(), inner=inner, overlap=False, bucket_bytes=None)
    found = [
        (bucket.spec.dtype, [tensor.name for tensor in bucket.spec.tensors])
        for bucket in optimizer._trained.reducer.buckets
    ]
    assert found == [("float64", ["4.weight"]), ("float32", ["2.bias", "0.bias", "2.weight", "0.weight"])]
    assert optimizer._trained.reducer.tuner is not None
    assert optimizer._trained.reducer.tuner._tuning is None, "there is nothing to try"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("communicator", "how"),
    [
        (single_server, {}),
        (single_server, {"overlap": False, "cross_barrier": True}),
        (single_server, {"overlap": False, "bucket_bytes": SMALL}),
        (lambda: FakeRank(FakeHub(1, "worker")), {"overlap": False}),
        (LocalCommunicator, {"overlap": False}),
    ],
    ids=["overlap", "cross_barrier", "bucket_bytes", "aggregate", "local"],
)
def test_buckets_are_bounded_where_one_may_go_on_before_the_others(communicator: Any, how: Any) -> None:
    model = build()
    optimizer = wrap(model, communicator(), **{"bucket_bytes": None, **how})
    assert len(optimizer._trained.reducer.buckets) == number_of_buckets()


def test_buckets_on_a_device_are_larger() -> None:
    held = [torch.zeros(1), torch.zeros(1, device="meta")]
    assert parameters.bytes_of_bucket(held, at_once=False) == parameters.GPU_BUCKET_BYTES
    assert parameters.bytes_of_bucket(held, at_once=True) == parameters.UNBOUNDED
