"""The attributes of Horovod's wrapped optimizer that scripts use, and classes derived from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hubring.horovod as hvd
from hubring.workers.horovod.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer
from tests.workers.horovod.conftest import every_rank


def two_layers() -> nn.ModuleDict:
    layers = nn.ModuleDict({"used": nn.Linear(2, 1, bias=False), "idle": nn.Linear(2, 1, bias=False)})
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 1.0)
    return layers


def decaying(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@every_rank
def test_names_compression_and_running_gradients_are_shown() -> None:
    model = two_layers()
    optimizer = hvd.DistributedOptimizer(
        decaying(model), model.named_parameters(), compression=hvd.Compression.fp16, groups=2
    )
    used, idle = model["used"].weight, model["idle"].weight
    assert optimizer._parameter_names == {used: "used.weight", idle: "idle.weight"}
    assert optimizer._compression is hvd.Compression.fp16
    assert optimizer._requires_update == {used, idle}
    assert not optimizer._handles
    model["used"](torch.ones(1, 2)).sum().backward()
    ((parameter, (handle, context)),) = optimizer._handles.items()
    assert parameter is used
    assert isinstance(handle, int)
    assert context is torch.float32
    assert optimizer._allreduce_delay == {used: 0, idle: 1}
    assert optimizer._requires_update - optimizer._handles.keys() == {idle}
    with pytest.raises(AttributeError, match="clear"):
        optimizer._handles.clear()
    optimizer.step()
    assert not optimizer._handles


@pytest.mark.parametrize(
    ("op", "wrapper"),
    [
        (hvd.Average, _DistributedOptimizer),
        (hvd.Sum, _DistributedOptimizer),
        (hvd.Adasum, _DistributedAdasumOptimizer),
    ],
)
@every_rank
def test_both_wrappers_have_the_attributes(op: int, wrapper: type) -> None:
    model = two_layers()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), op=op)
    assert issubclass(type(optimizer), wrapper)
    assert list(optimizer._parameter_names.values()) == ["allreduce.noname.0.0", "allreduce.noname.1.0"]
    assert optimizer._requires_update == set(model.parameters())
    assert (optimizer.op, optimizer.backward_passes_per_step) == (op, 1)
    assert optimizer.process_set is hvd.global_process_set
    model["used"](torch.ones(1, 2)).sum().backward()
    assert optimizer._handles == {model["used"].weight: (None, None)}  # the bucket is not complete
    optimizer.step()
    assert not optimizer._handles
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2


@every_rank
def test_a_parameter_that_needs_no_update_is_not_stepped_where_no_rank_uses_it() -> None:
    """`optimizer._requires_update = set()`, which scripts write for frozen or unused layers."""

    alone, model = two_layers(), two_layers()
    optimizer = hvd.DistributedOptimizer(decaying(model), model.named_parameters())
    optimizer._requires_update = set()
    for one, layers in ((decaying(alone), alone), (optimizer, model)):
        for _ in range(3):
            one.zero_grad()
            layers["used"](torch.ones(1, 2)).sum().backward()
            one.step()
        assert layers["idle"].weight.grad is None
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


@every_rank
def test_a_parameter_that_needs_no_update_gets_the_mean_where_some_rank_uses_it() -> None:
    model = two_layers()
    optimizer = hvd.DistributedOptimizer(decaying(model), model.named_parameters())
    optimizer._requires_update = set()
    model[("used", "idle")[hvd.rank()]](torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert [one.grad[0, 0].item() for one in model.parameters() if one.grad is not None] == [0.5, 0.5]


@every_rank
def test_a_derived_class_trains_as_the_function_does() -> None:
    models = [two_layers(), two_layers()]
    kind = type("SGD", (_DistributedOptimizer, torch.optim.SGD), {})
    plain = decaying(models[0])
    derived = kind(plain.param_groups, models[0].named_parameters(), hvd.Compression.none)
    made = hvd.DistributedOptimizer(decaying(models[1]), models[1].named_parameters())
    assert isinstance(made, _DistributedOptimizer)
    for optimizer, model in zip((derived, made), models, strict=True):
        for _ in range(2):
            model["used"](torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@every_rank
def test_copied_methods_and_overridden_internals_are_refused_with_what_to_write() -> None:
    assert _DistributedOptimizer.find_duplicates(["a", "b", "a"]) == {"a"}
    with pytest.raises(
        TypeError, match=r"Mine overrides _make_hook, which Hubring never calls.*compression="
    ):
        type("Mine", (_DistributedOptimizer,), {"_make_hook": None})
    plain = decaying(two_layers())
    copied = type("SGD", (torch.optim.SGD,), dict(_DistributedOptimizer.__dict__))
    with pytest.raises(
        TypeError, match=r"derive it instead: type\('SGD', \(_DistributedOptimizer, SGD\), \{\}\)"
    ):
        copied(plain.param_groups, None, hvd.Compression.none)
