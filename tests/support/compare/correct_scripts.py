"""Scripts that train correctly, each in another way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from tests.support.compare.audited import CLASSES, FEATURES, Script, Training, plain, small, taking
from tests.support.compare.unusual_scripts import UNUSUAL

Make = Callable[[nn.Module], torch.optim.Optimizer]


def made(kind: type[torch.optim.Optimizer], **options: Any) -> Make:
    """Returns what makes an optimizer of one group."""
    return lambda model: kind(model.parameters(), **options)


def grouped(kind: type[torch.optim.Optimizer], *options: dict[str, Any], **common: Any) -> Make:
    """Returns what makes an optimizer with a group for the weights and one for the biases."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights = [one for one in model.parameters() if one.dim() > 1]
        biases = [one for one in model.parameters() if one.dim() == 1]
        groups = [{"params": each, **more} for each, more in zip((weights, biases), options, strict=True)]
        return kind(groups, **common)

    return make


# What scripts do in a step.


clipped = taking(after=lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 0.05))


def accumulated(training: Training, inputs: Tensor, labels: Tensor) -> None:
    training.optimizer.zero_grad()
    for part, wanted in zip(inputs.chunk(2), labels.chunk(2), strict=True):
        (training.loss(part, wanted) / 2).backward()
    training.optimizer.step()


def never_zeroed(training: Training, inputs: Tensor, labels: Tensor) -> None:
    training.loss(inputs, labels).backward()
    training.optimizer.step()


def _bfloat16_loss(training: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return training.loss(inputs, labels)


in_bfloat16 = taking(_bfloat16_loss)


def scaled(training: Training, inputs: Tensor, labels: Tensor, limit: float = 0.0) -> None:
    scaler = training.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    training.optimizer.zero_grad()
    scaler.scale(training.loss(inputs, labels)).backward()
    if limit:
        scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), limit)
    scaler.step(training.optimizer)
    scaler.update()


def overflowing(training: Training, inputs: Tensor, labels: Tensor) -> None:
    """Every fourth loss overflows on one rank, so all ranks skip the step."""
    scaler = training.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=64.0))
    training.optimizer.zero_grad()
    loss = training.loss(inputs, labels)
    if training.number % 4 == 0 and training.communicator.rank == 0:
        loss = loss * torch.inf
    scaler.scale(loss).backward()
    scaler.step(training.optimizer)
    scaler.update()


def weighted(training: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    """Gives each sample the same weight if ranks have different numbers of them."""
    training.optimizer.weight = len(inputs)
    return training.loss(inputs, labels)


def through_closure(training: Training, inputs: Tensor, labels: Tensor) -> None:
    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(inputs, labels)
        loss.backward()
        return loss

    training.optimizer.step(closure)


def half_used(training: Training, inputs: Tensor, labels: Tensor, every: int = 2) -> Tensor:
    """In every second step the last layer alone is trained."""
    if training.number % every:
        return training.loss(inputs, labels)
    first, rest = training.layers[0], training.layers[1:]
    return functional.cross_entropy(rest(first(inputs).detach()), labels)


# What scripts do between steps.


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[Training], None]:
    """Returns what lets a scheduler step, from the second step on."""

    def before(training: Training) -> None:
        if "scheduler" not in training.kept:
            training.kept["scheduler"] = make(training.optimizer)
        else:
            training.kept["scheduler"].step()

    return before


def stopping(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0 if training.number in (5, 6) else 0.05


def hooking(training: Training) -> None:
    """Clips gradients with hooks, which run after they were recorded."""
    if training.number == 1:
        for parameter in training.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def joining(training: Training) -> None:
    training.optimizer.join()


def shrinking(training: Training) -> None:
    """Keeps the parameters within bounds, as some GANs do."""
    if training.number > 1:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.clamp_(-0.3, 0.3)


def fewer_batches(inputs: Tensor, rank: int, size: int) -> Tensor:
    """Leaves nothing of a batch of seven samples for the last rank."""
    return inputs[rank::size] if len(inputs) > 7 or rank < size - 1 else inputs[:0]


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer that has taken a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


# Models.


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 500), nn.ReLU(), nn.Linear(500, CLASSES))


def frozen() -> nn.Module:
    model = small()
    model[0].requires_grad_(False)
    return model


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def convolving() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, CLASSES))


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, CLASSES))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    model[2].weight = model[0].weight
    return model


def double() -> nn.Module:
    return small().double()


def rounded() -> nn.Module:
    return small().to(torch.bfloat16)


def take_as(dtype: torch.dtype) -> Callable[[Training, Tensor, Tensor], None]:
    """Returns a step with samples of another dtype."""
    return lambda training, inputs, labels: plain(training, inputs.to(dtype), labels)


_OPTIMIZERS: dict[str, Make] = {
    "sgd": made(torch.optim.SGD, lr=0.1),
    "momentum": made(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": made(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "dampening": made(torch.optim.SGD, lr=0.05, momentum=0.8, dampening=0.3),
    "maximize": made(torch.optim.SGD, lr=0.01, maximize=True),
    "adam": made(torch.optim.Adam, lr=1e-2),
    "adam l2": made(torch.optim.Adam, lr=1e-2, weight_decay=1e-2),
    "amsgrad": made(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "adamw": made(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.95)),
    "rmsprop": made(torch.optim.RMSprop, lr=1e-3),
    "centered": made(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": made(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1, lr_decay=1e-2),
}
"""Those that a hub has too."""

SCRIPTS: dict[str, Script] = {
    **{name: Script(optimizer=make) for name, make in _OPTIMIZERS.items()},
    **{
        f"{name}, tiny learning rate": Script(optimizer=made(kind, lr=lr), steps=20)
        for name, kind, lr in (
            ("sgd", torch.optim.SGD, 1e-7),
            ("adam", torch.optim.Adam, 1e-8),
            ("adamw", torch.optim.AdamW, 1e-7),
        )
    },
    "warm restarts": Script(before=scheduled(partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4))),
    "one cycle": Script(before=scheduled(partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=20))),
    "steps": Script(before=scheduled(partial(lr_scheduler.StepLR, step_size=3))),
    "stopped for two steps": Script(optimizer=_OPTIMIZERS["adam"], before=stopping),
    "groups": Script(optimizer=grouped(torch.optim.SGD, {"lr": 0.1}, {"lr": 0.01}, momentum=0.9)),
    "groups, adamw": Script(
        optimizer=grouped(torch.optim.AdamW, {"weight_decay": 0.1}, {"weight_decay": 0.0}, lr=1e-2)
    ),
    "clipped": Script(take=clipped),
    "clipped, adam": Script(optimizer=_OPTIMIZERS["adam"], take=clipped),
    "accumulated": Script(take=accumulated, options={"backward_passes_per_step": 2}),
    "never zeroed": Script(optimizer=made(torch.optim.SGD, lr=1e-2), take=never_zeroed),
    "autocast": Script(take=in_bfloat16),
    "scaled": Script(take=scaled),
    "scaled and clipped": Script(take=partial(scaled, limit=0.1)),
    "overflowing": Script(take=overflowing),
    "weighted last batch": Script(take=taking(weighted), last=7),
    "closure": Script(take=through_closure),
    "half used": Script(take=taking(half_used)),
    "frozen": Script(model=frozen),
    "batch norm": Script(normalized),
    "wide": Script(wide, made(torch.optim.SGD, lr=0.01), options={"bucket_bytes": 8192}),
    "dropout": Script(dropping),
    "convolution": Script(convolving, shape=(1, 6, 6)),
    "channels last": Script(channels_last, shape=(2, 6, 6)),
    "shared weight": Script(tied, last=12),
    "float64": Script(double, take=take_as(torch.float64)),
    "bfloat16": Script(rounded, take=take_as(torch.bfloat16)),
    "no overlap": Script(options={"overlap": False}),
    "across the barrier": Script(options={"cross_barrier": True}),
    "parameters within bounds": Script(before=shrinking, options={"overlap": False}),
    "hooks that clip": Script(before=hooking),
    "ranks with fewer batches": Script(
        deal=fewer_batches, ends=joining, options={"uneven": True, "overlap": False}
    ),
    "one bucket": Script(options={"bucket_bytes": 1 << 20}),
    "momentum in 30 steps": Script(steps=30),
    **UNUSUAL,
}
"""Those that run on every row."""
