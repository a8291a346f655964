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
from hubring.ps.job.plan_protos import LEAST_BUCKET, difference
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.buckets.layout import lay_out
from hubring.workers.buckets.value_memory import ComparedValues
from tests.support.training.buckets import allocate, buckets_of


def names(bucket: Bucket) -> list[str]:
    return [tensor.name for tensor in bucket.spec.tensors]


def three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 1))


def test_parameters_lie_in_reverse_order_of_registration() -> None:
    (bucket,) = buckets_of(three_layers())
    assert names(bucket) == ["2.bias", "2.weight", "1.bias", "1.weight", "0.bias", "0.weight"]
    assert (bucket.spec.index, bucket.spec.dtype, bucket.spec.optimizer) == (0, "float32", "SGD")


def test_every_parameter_and_collected_gradient_is_a_view_of_its_bucket() -> None:
    model = three_layers()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    (bucket,) = buckets_of(model)
    model(torch.ones(5, 4)).sum().backward()
    bucket.collect()
    offset = 0
    for tensor, parameter in zip(bucket.spec.tensors, bucket.parameters, strict=True):
        piece = slice(offset, offset + tensor.numel)
        assert torch.equal(parameter, before[tensor.name])
        assert torch.equal(bucket.values[piece].view(tensor.shape), parameter)
        assert parameter.data_ptr() == bucket.values[piece].data_ptr()
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == bucket.gradients[piece].data_ptr()
        offset += tensor.numel
    assert offset == bucket.values.numel() == bucket.gradients.numel()


def test_backward_accumulates_into_the_flat_gradients() -> None:
    model = three_layers()
    (bucket,) = buckets_of(model)
    for expected in (5, 10):
        model(torch.ones(5, 4)).sum().backward()
        bucket.collect()
        assert bucket.gradients[0] == expected  # the last layer's bias


def test_a_parameter_above_the_limit_gets_a_bucket_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 100), nn.Linear(100, 1))
    found = [names(bucket) for bucket in buckets_of(model, bucket_bytes=404)]
    assert found == [["2.bias", "2.weight"], ["1.bias"], ["1.weight"], ["0.bias", "0.weight"]]


def test_groups_and_dtypes_are_never_mixed() -> None:
    model = three_layers()
    model[1].double()
    biases = [layer.bias for layer in model]
    weights = [layer.weight for layer in model]
    groups: list[dict[str, Any]] = [{"params": biases}, {"params": weights, "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    found = {
        (bucket.spec.group, bucket.spec.dtype): set(names(bucket)) for bucket in buckets_of(model, optimizer)
    }
    assert found == {
        (0, "float32"): {"0.bias", "2.bias"},
        (0, "float64"): {"1.bias"},
        (1, "float32"): {"0.weight", "2.weight"},
        (1, "float64"): {"1.weight"},
    }


@given(
    shapes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    groups=st.lists(st.booleans(), min_size=12, max_size=12),
    bucket_bytes=st.integers(1, 200),
)
def test_buckets_hold_each_parameter_once_and_are_ordered_by_their_last(
    shapes: list[int], groups: list[bool], bucket_bytes: int
) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    sides = list(zip(parameters, groups, strict=False))
    chosen = [[parameter for parameter, side in sides if side is wanted] for wanted in (True, False)]
    optimizer = torch.optim.SGD([{"params": group} for group in chosen if group], lr=0.1)
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    buckets = make_buckets(optimizer, named, allocate, bucket_bytes, "")
    places = [[len(parameters) - 1 - int(name) for name in names(bucket)] for bucket in buckets]
    assert sorted(place for run in places for place in run) == list(range(len(parameters)))
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
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        sides = list(zip(parameters, groups, strict=False))
        chosen = [[parameter for parameter, side in sides if side is wanted] for wanted in (True, False)]
        optimizer = torch.optim.SGD([{"params": group} for group in chosen if group], lr=0.1)
        named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
        return [layout.spec for layout in lay_out(optimizer, named, bound, "SGD")]

    held, offered = (specs(bound) for bound in bucket_bytes)
    clause = difference(held, offered)
    assert (clause is None) == (held == offered)
    if clause is not None:
        told = re.search(r"--bucket-bytes (\d+)", clause)
        assert told is not None
        assert int(told[1]) >= LEAST_BUCKET
        assert specs(int(told[1])) == held


def test_tied_weights_appear_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    (bucket,) = buckets_of(model)
    assert sorted(names(bucket)) == ["0.bias", "0.weight", "1.bias"]


def test_tied_weights_appear_once_where_both_names_are_given() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = model.named_parameters(remove_duplicate=False)
    (bucket,) = make_buckets(optimizer, named, allocate, 1 << 20, "")
    assert sorted(names(bucket)) == ["0.bias", "0.weight", "1.bias"]


def test_frozen_parameters_are_left_alone() -> None:
    model = three_layers()
    model[0].requires_grad_(False)
    before = model.get_parameter("0.weight").data_ptr()
    (bucket,) = buckets_of(model)
    assert not any(name.startswith("0.") for name in names(bucket))
    weight = model.get_parameter("0.weight")
    assert weight.data_ptr() == before
    assert weight.grad is None


def test_a_parameter_unknown_to_the_model_is_named() -> None:
    model, stranger = three_layers(), nn.Parameter(torch.zeros(7, 2))
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


def test_what_cannot_be_exchanged_is_refused() -> None:
    complex_weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    lazy = nn.LazyLinear(2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for parameters, match in (
        ([complex_weight], "complex64"),
        (list(lazy.parameters()), "no shape yet"),
        (list(frozen.parameters()), "no trainable parameter"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_buckets(torch.optim.SGD(parameters, lr=0.1), None, allocate, 100, "")
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        buckets_of(nn.Linear(2, 2), bucket_bytes=0)


def test_channels_last_weights_keep_their_strides_and_the_hub_has_them_in_order() -> None:
    model = nn.utils.convert_conv2d_weight_memory_format(nn.Conv2d(3, 4, 2), torch.channels_last)
    before = model.weight.detach().clone()
    (bucket,) = buckets_of(model)
    assert torch.equal(model.weight, before)
    assert torch.equal(bucket.values[4:], before.flatten())
    bucket.landing[4:] = 2 * before.flatten()
    bucket.stage.arrive()
    bucket.show_values()
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, 2 * before)
    assert bucket.written() == []


def test_a_change_of_a_channels_last_weight_is_found() -> None:
    model = nn.utils.convert_conv2d_weight_memory_format(nn.Conv2d(3, 4, 2), torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (bucket,) = make_buckets(optimizer, model.named_parameters(), allocate, 1 << 20, "SGD", ComparedValues)
    with torch.no_grad():
        model.weight[1, 2] = 7.0
    assert bucket.take_written() == [names(bucket).index("weight")]
    assert torch.equal(bucket.values[-48:].view(4, 3, 2, 2), model.weight)


def test_each_parameter_on_a_hub_has_a_storage_of_its_own() -> None:
    model = three_layers()
    buckets_of(model)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_scalars_and_empty_parameters_are_dealt_with() -> None:
    scalar, empty = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.zeros(0, 4))
    (bucket,) = make_buckets(torch.optim.SGD([scalar, empty], lr=0.1), None, allocate, 100, "")
    (scalar * 2).backward()
    bucket.seal()
    assert bucket.gradients.tolist() == [2.0]
    assert bucket.spec.tensors[0].shape == ()


def test_where_workers_step_parameters_stay_where_they_are() -> None:
    model = nn.Linear(2, 1)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    (bucket,) = make_buckets(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), allocate, 100, ""
    )
    bucket.values.fill_(4.0)
    with torch.no_grad():
        bucket.hand_out()
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert model.weight.tolist() == [[4.0, 4.0]]
    assert bucket.values.numel() == 0


def test_parameters_that_share_memory_are_refused_where_the_hub_steps() -> None:
    first = nn.Parameter(torch.zeros(4))
    second = nn.Parameter(first.detach()[1:])
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    named = [("first", first), ("second", second)]
    with pytest.raises(ConfigError, match=r"first and second share memory.*as one parameter"):
        make_buckets(optimizer, named, allocate, 100, "SGD")
    make_buckets(optimizer, named, allocate, 100, "")


def test_an_expanded_parameter_is_refused_where_the_hub_steps() -> None:
    expanded = nn.Parameter(torch.zeros(1, 3).expand(2, 3))
    optimizer = torch.optim.SGD([expanded], lr=0.1)
    with pytest.raises(ConfigError, match=r"parameter group0\.0 share memory.*clone"):
        make_buckets(optimizer, None, allocate, 100, "SGD")
    make_buckets(optimizer, None, allocate, 100, "")


def test_a_model_that_is_converted_afterwards_is_found_out() -> None:
    model = nn.Linear(2, 1)
    (bucket,) = buckets_of(model)
    assert bucket.written() == []
    model.double()
    with pytest.raises(ConfigError, match="bias was moved or converted"):
        bucket.written()


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


def test_on_the_cpu_host_memory_is_the_bucket_itself() -> None:
    (bucket,) = buckets_of(nn.Linear(2, 1))
    assert bucket.host_gradients is bucket.gradients
    assert bucket.host_values is bucket.values


def test_values_that_land_apart_are_seen_when_they_arrive() -> None:
    model = three_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    named = model.named_parameters()
    (bucket,) = make_buckets(optimizer, named, allocate, 1 << 20, "SGD", ComparedValues)
    assert bucket.written() == []
    assert [parameter.detach().tolist() for parameter in model.parameters()] == [
        tensor.tolist() for tensor in before
    ]
    assert bucket.host_values is bucket.landing is not bucket.values
    bucket.parameters[4].data[0] = 3.0
    bucket.parameters[1].data.neg_()
    assert bucket.written() == [1, 4]
    bucket.host_values.fill_(5.0)
    assert bucket.parameters[4][0] == 3.0
    bucket.stage.arrive()
    assert bucket.written() == []
    assert all((parameter == 5.0).all() for parameter in model.parameters())
    bucket.parameters[0].data.fill_(torch.nan)
    bucket.forget_writes()
    assert bucket.parameters[0] == 5.0
    bucket.landing.fill_(torch.nan)
    bucket.forget_writes()
    assert bucket.written() == [], "NaN differs from itself"
    bucket.values[-1] = -torch.nan
    assert bucket.written() == [5]


def test_where_workers_step_the_scripts_writes_are_not_told_apart() -> None:
    (bucket,) = buckets_of(three_layers())
    bucket.parameters[0].data.fill_(3.0)
    assert bucket.written() == []
    bucket.forget_writes()
    assert bucket.parameters[0] == 3.0
