from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec
from hubring.ps.job.control_messages import LEAST_BUCKET, model_difference
from hubring.workers.buckets import bucketing
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import lay_out, make_buckets
from hubring.workers.buckets.value_memory import ComparedValues
from tests.support.training.buckets import allocate, buckets_of


def names(bucket: Bucket) -> list[str]:
    return [tensor.name for tensor in bucket.spec.tensors]


def two_groups(
    shapes: list[int], groups: list[bool]
) -> tuple[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]]:
    """Returns an optimizer of parameters in one or two groups, and the parameters named by their number."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    sides = list(zip(parameters, groups, strict=False))
    chosen = [[parameter for parameter, side in sides if side is wanted] for wanted in (True, False)]
    optimizer = torch.optim.SGD([{"params": group} for group in chosen if group], lr=0.1)
    return optimizer, [(str(index), parameter) for index, parameter in enumerate(parameters)]


@given(
    shapes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    groups=st.lists(st.booleans(), min_size=12, max_size=12),
    bucket_bytes=st.integers(1, 200),
)
def test_buckets_hold_each_parameter_once_and_are_ordered_by_their_last(
    shapes: list[int], groups: list[bool], bucket_bytes: int
) -> None:
    optimizer, named = two_groups(shapes, groups)
    buckets = make_buckets(optimizer, named, allocate, bucket_bytes, "")
    places = [[len(named) - 1 - int(name) for name in names(bucket)] for bucket in buckets]
    assert sorted(place for run in places for place in run) == list(range(len(named)))
    assert [place[-1] for place in places] == sorted(place[-1] for place in places)
    assert [bucket.spec.index for bucket in buckets] == list(range(len(buckets)))
    for bucket, place in zip(buckets, places, strict=True):
        assert place == sorted(place)
        assert len(place) == 1 or bucket.gradients.nbytes <= bucket_bytes


@given(
    shapes=st.lists(st.integers(LEAST_BUCKET // 4, 40), min_size=1, max_size=12),
    groups=st.lists(st.booleans(), min_size=12, max_size=12),
    bucket_bytes=st.tuples(st.integers(LEAST_BUCKET, 2000), st.integers(LEAST_BUCKET, 2000)),
)
def test_buckets_cut_otherwise_are_told_what_makes_them_alike(
    shapes: list[int], groups: list[bool], bucket_bytes: tuple[int, int]
) -> None:
    def specs(bound: int) -> list[BucketSpec]:
        return [layout.spec for layout in lay_out(*two_groups(shapes, groups), bound, "SGD")]

    held, offered = (specs(bound) for bound in bucket_bytes)
    clause = model_difference(held, offered)
    assert (clause is None) == (held == offered)
    if clause is not None:
        told = re.search(r"--bucket-bytes (\d+)", clause)
        assert told is not None
        assert int(told[1]) >= LEAST_BUCKET
        assert specs(int(told[1])) == held


def test_groups_share_buckets_and_a_hub_has_the_parameters_of_each_side_by_side() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    groups: list[dict[str, Any]] = [
        {"params": [one.weight for one in model], "weight_decay": 0.1},
        {"params": [one.bias for one in model]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    named = list(model.named_parameters())
    (here,) = make_buckets(optimizer, named, allocate, 1 << 20, "")
    assert names(here) == ["2.bias", "2.weight", "1.bias", "1.weight", "0.bias", "0.weight"]
    (there,) = make_buckets(optimizer, named, allocate, 1 << 20, "SGD")
    assert names(there) == ["2.bias", "1.bias", "0.bias", "2.weight", "1.weight", "0.weight"]


def test_a_bucket_of_a_hub_has_only_as_many_groups_as_a_push_can_describe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucketing, "MOST_GROUPS", 3)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(7)]
    optimizer = torch.optim.SGD([{"params": [one]} for one in parameters], lr=0.1)
    buckets = make_buckets(optimizer, None, allocate, 1 << 20, "SGD")
    assert [len(names(bucket)) for bucket in buckets] == [3, 3, 1]


def test_a_parameter_unknown_to_the_model_is_named() -> None:
    model, stranger = nn.Linear(4, 3), nn.Parameter(torch.zeros(7, 2))
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": [stranger]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ConfigError, match=r"shape \(7, 2\) in param_groups\[1\]"):
        buckets_of(model, optimizer)


def test_one_name_for_two_parameters_is_refused() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    with pytest.raises(ConfigError, match="'w'"):
        make_buckets(optimizer, [("w", first), ("w", second)], allocate, 100, "")


def test_without_a_model_parameters_are_named_by_group_and_place() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(2))]}], lr=0.1)
    (bucket,) = make_buckets(optimizer, None, allocate, 100, "")
    assert names(bucket) == ["group0.0"]


def test_parameters_that_cannot_be_exchanged_are_refused() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for layer, match in ((nn.LazyLinear(2), "no shape yet"), (frozen, "no trainable parameter")):
        with pytest.raises(ConfigError, match=match):
            make_buckets(torch.optim.SGD(layer.parameters(), lr=0.1), None, allocate, 100, "")
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        buckets_of(nn.Linear(2, 2), bucket_bytes=0)


def test_a_change_of_a_channels_last_weight_is_found() -> None:
    model = nn.utils.convert_conv2d_weight_memory_format(nn.Conv2d(3, 4, 2), torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (bucket,) = make_buckets(optimizer, model.named_parameters(), allocate, 1 << 20, "SGD", ComparedValues)
    with torch.no_grad():
        model.weight[1, 2] = 7.0
    assert bucket.take_written() == [names(bucket).index("weight")]
    assert torch.equal(bucket.values[-48:].view(4, 3, 2, 2), model.weight)


def test_scalars_and_empty_parameters_are_dealt_with() -> None:
    scalar, empty = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.zeros(0, 4))
    (bucket,) = make_buckets(torch.optim.SGD([scalar, empty], lr=0.1), None, allocate, 100, "")
    (scalar * 2).backward()
    bucket.seal()
    assert bucket.gradients.tolist() == [2.0]
    assert bucket.spec.tensors[0].shape == ()


def test_an_expanded_parameter_is_refused_where_the_hub_steps() -> None:
    expanded = nn.Parameter(torch.zeros(1, 3).expand(2, 3))
    optimizer = torch.optim.SGD([expanded], lr=0.1)
    with pytest.raises(ConfigError, match=r"parameter group0\.0 share memory"):
        make_buckets(optimizer, None, allocate, 100, "SGD")
    make_buckets(optimizer, None, allocate, 100, "")


def test_lent_gradients_are_given_back_though_the_step_fails() -> None:
    model = nn.Linear(2, 1)
    (bucket,) = buckets_of(model)
    own = torch.ones(1, 2)
    model.weight.grad = own
    model.bias.grad = None
    with pytest.raises(RuntimeError, match="shape"), bucket.lent_gradients():
        torch.ones(2).view(3)
    assert model.weight.grad is own
    assert model.bias.grad is None
