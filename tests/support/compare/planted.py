"""Faults that a test plants into the code that exchanges and steps. Most begin late, or come rarely."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.optim import lr_scheduler

from hubring.ps.core.messages import Delivery, Values
from hubring.ps.core.optimizer_state import STEP, OptimizerState
from hubring.ps.store.key_state import KeyEntry, Reader
from hubring.ps.store.rounds import PushRounds
from hubring.workers.buckets.bucket import Bucket
from tests.support.compare.audited import HERE, SIZE, Script, taking
from tests.support.compare.correct_scripts import grouped, half_used, made, rounded, scheduled, take_as
from tests.support.compare.worker_faults import (
    Plant,
    first_group,
    instead,
    old_options,
    one_rank_sits_out,
    pushing,
    twice_across,
)

Change = Callable[[KeyEntry, list[Tensor], dict[str, float]], tuple[list[Tensor], dict[str, float]]]
"""Changes the gradients and hyperparameters of one step of a key."""


class Planted(Struct, frozen=True):
    """A fault, and where it shows.

    Attributes:
        row: The row that has it.
        plant: Plants it.
        script: What is trained.
        says: A part of the gate's words.
    """

    row: str
    plant: Plant
    script: Script = Script(steps=14)
    says: str = ""


def _on_hub(change: Change) -> Any:
    """Changes what a shard steps with."""

    def wrong(step: Any, entry: KeyEntry, gradients: Any, hyper: Any, *rest: Any) -> None:
        step(entry, *change(entry, list(gradients), dict(hyper)), *rest)

    return instead(KeyEntry, "step", wrong)


def _of(steps: Callable[[int], bool], **factors: float) -> Plant:
    """Multiplies hyperparameters in some steps."""

    def change(entry: KeyEntry, gradients: list[Tensor], hyper: dict[str, float]) -> Any:
        wrong = {name: hyper[name] * factor for name, factor in factors.items()}
        return gradients, hyper | (wrong if steps(entry.version + 1) else {})

    return lambda: _on_hub(change)


def _pushes(steps: Callable[[int], bool], change: Callable[[list[Tensor]], list[Tensor]]) -> Plant:
    """Changes the gradients that a shard averages in some steps."""

    def wrong(entry: KeyEntry, gradients: list[Tensor], hyper: dict[str, float]) -> Any:
        return (change(gradients) if steps(entry.version + 1) else gradients), hyper

    return lambda: _on_hub(wrong)


def _first_learning_rate(entry: KeyEntry, gradients: list[Tensor], hyper: dict[str, float]) -> Any:
    return gradients, hyper | {"lr": 0.1 if entry.version >= 6 else hyper["lr"]}


def _repeated(times: int, at: int, *, counts: bool = False) -> Any:
    """Steps a key `times` times in one step. `counts`: its version counts all of them."""

    def wrong(step: Any, entry: KeyEntry, *given: Any) -> None:
        version = entry.version
        for _ in range(times if version + 1 == at else 1):
            step(entry, *given)
        entry.version = entry.version if counts else version + 1

    return instead(KeyEntry, "step", wrong)


def _before_hub_steps(at: int, action: Callable[[KeyEntry], None]) -> Any:
    def wrong(step: Any, entry: KeyEntry, *given: Any) -> None:
        if entry.version + 1 == at:
            action(entry)
        step(entry, *given)

    return instead(KeyEntry, "step", wrong)


def _forget(entry: KeyEntry) -> None:
    entry.optimizer.load(OptimizerState())


def _count_again(entry: KeyEntry) -> None:
    state = entry.optimizer.state()
    if STEP in state.tensors:
        tensors = {**state.tensors, STEP: torch.ones_like(state.tensors[STEP])}
        entry.optimizer.load(OptimizerState(tensors, state.fresh, state.cuts))


def _steps_frozen() -> Any:
    """The hub steps parameters that no rank has a gradient of."""

    def wrong(step: Any, entry: KeyEntry, gradients: Any, hyper: Any, absent: Any, *rest: Any) -> None:
        step(entry, gradients, hyper, (), *rest)

    return instead(KeyEntry, "step", wrong)


def _stale_answer(rank: int, at: int) -> Any:
    """One rank gets parameters of the step before."""
    earlier = dict[int, Tensor]()

    def wrong(reply: Any, rounds: PushRounds, entry: KeyEntry, reader: Reader) -> list[Delivery]:
        deliveries: list[Delivery] = reply(rounds, entry, reader)
        if entry.version == at - 1:
            earlier[id(entry)] = entry.values.clone()
        if entry.version == at and reader.sender.rank == rank:
            for _, values in deliveries:
                assert isinstance(values, Values)
                values.values = earlier[id(entry)]
        return deliveries

    return instead(PushRounds, "reply", wrong)


def _sealing(change: Callable[[Bucket, int], None]) -> Any:
    """Changes a bucket just before it is sent; `change` gets the step."""

    def wrong(seal: Any, bucket: Bucket, left_out: Any = frozenset(), steps: int = 0) -> None:
        seal(bucket, left_out, steps)
        change(bucket, steps + 1)

    return instead(Bucket, "seal", wrong)


def _sent(steps: Callable[[int], bool], factor: float, rank: int | None = None) -> Plant:
    """Multiplies what is sent in some steps, on one rank or on all."""

    def change(bucket: Bucket, step: int) -> None:
        if steps(step) and rank in (None, HERE.rank):
            bucket.gradients.mul_(factor)

    return lambda: _sealing(change)


def _with_earlier(bucket: Bucket, step: int) -> None:
    """Adds the gradient of an earlier step, which was not cleared."""
    earlier = vars(bucket).get("planted")
    vars(bucket)["planted"] = bucket.gradients.clone()
    if earlier is not None and step == 9:
        bucket.gradients.add_(earlier)


def _arriving(steps: Callable[[int], bool], change: Callable[[Bucket], None]) -> Any:
    """Changes means as they arrive."""
    counts = dict[int, int]()

    def wrong(show: Any, bucket: Bucket) -> None:
        counts[id(bucket)] = counts.get(id(bucket), 0) + 1
        if steps(counts[id(bucket)]):
            change(bucket)
        show(bucket)

    return instead(Bucket, "show_means", wrong)


def _halve(bucket: Bucket) -> None:
    bucket.gradients.mul_(0.5)


def _own_last(bucket: Bucket) -> None:
    bucket.gradients[-1] *= 1.5


def _pushed(
    rank: int | None = None, key: int | None = None, number: int | None = None, factor: float | None = None
) -> Plant:
    """Drops pushes of a rank, or of all; to a key, or to all; the one with this number, or every one.

    With a factor they are sent, times it.
    """
    return lambda: pushing(
        lambda *push: all(want in (None, have) for want, have in zip((rank, key, number), push, strict=True)),
        factor,
    )


def _from(first: int) -> Callable[[int], bool]:
    return lambda step: step >= first


def _at(*steps: int) -> Callable[[int], bool]:
    return lambda step: step in steps


def _every(number: int) -> Callable[[int], bool]:
    return lambda step: step % number == 0


def _one_of(gradients: list[Tensor]) -> list[Tensor]:
    return gradients[:1]


def _half_lost(gradients: list[Tensor]) -> list[Tensor]:
    return [torch.cat([one[: len(one) // 2], torch.zeros_like(one[len(one) // 2 :])]) for one in gradients]


def _times(factor: float) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda gradients: [one * factor for one in gradients]


def _same_samples(inputs: Tensor, rank: int, size: int) -> Tensor:
    return inputs[:: size or rank]


IN_SCRIPT = ("ranks train on the same samples", "an uneven last batch")
"""Faults of the script itself, which show beside a single process."""

_LONG = Script(steps=30)
_DECAYED = Script(optimizer=made(torch.optim.SGD, lr=0.1, weight_decay=0.1), steps=14)
_ADAM = Script(optimizer=made(torch.optim.Adam, lr=1e-2), steps=14)
_TINY = Script(optimizer=made(torch.optim.SGD, lr=1e-7), steps=30)
_SCHEDULED = Script(before=scheduled(partial(lr_scheduler.StepLR, step_size=5)), steps=14)
_GROUPS = Script(optimizer=grouped(torch.optim.SGD, {"lr": 0.1}, {"lr": 0.01}), steps=14)
_CROSSING = Script(
    before=scheduled(partial(lr_scheduler.StepLR, step_size=5)), steps=14, options={"cross_barrier": True}
)
_ROUNDED = Script(
    rounded, made(torch.optim.SGD, lr=0.5), take=take_as(torch.bfloat16), steps=14
)  # updates are far above a unit in the last place
_PLAIN = Script(optimizer=made(torch.optim.SGD, lr=0.1), steps=14)

PLANTED: dict[str, Planted] = {
    # The hub, in rounds.
    "a hub ignores the schedule later": Planted(
        "hub-bsp", lambda: _on_hub(_first_learning_rate), _SCHEDULED, "times what torch's SGD does"
    ),
    "a hub loses a rank once": Planted("hub-bsp", _pushes(_at(9), _one_of), says="is off by"),
    "a hub adds instead of averaging, later": Planted(
        "hub-bsp", _pushes(_from(10), _times(SIZE)), _PLAIN, "it is 2 times"
    ),
    "a hub steps twice": Planted("hub-bsp", lambda: _repeated(2, 7)),
    "a hub skips a step": Planted("hub-bsp", lambda: _repeated(0, 11)),
    "a hub forgets its momentum": Planted("hub-bsp", lambda: _before_hub_steps(10, _forget)),
    "a hub forgets Adam's state": Planted("hub-bsp", lambda: _before_hub_steps(10, _forget), _ADAM),
    "a hub counts Adam's steps from 0 again": Planted(
        "hub-bsp", lambda: _before_hub_steps(6, _count_again), _ADAM
    ),
    "a hub ignores weight decay": Planted("hub-bsp", _of(_from(8), weight_decay=0.0), _DECAYED),
    "a hub has another beta1": Planted("hub-bsp", _of(_from(6), beta1=0.9), _ADAM),
    "a hub has another momentum": Planted("hub-bsp", _of(_from(6), momentum=0.99)),
    "a hub is off by one percent": Planted("hub-bsp", _of(_at(12), lr=1.01), says="is off by 0.01"),
    "a hub doubles a tiny learning rate": Planted("hub-bsp", _of(_from(1), lr=2.0), _TINY),
    "a hub loses half of a slice": Planted("hub-bsp", _pushes(_at(9), _half_lost)),
    "a hub sends old parameters": Planted("hub-bsp", lambda: _stale_answer(1, 9), says="on rank 1"),
    "a hub steps what has no gradient": Planted(
        "hub-bsp", _steps_frozen, Script(take=taking(partial(half_used, every=3)), steps=14)
    ),
    "a hub confuses groups": Planted("hub-bsp", first_group, _GROUPS),
    # Gradients on their way, on hub and ring alike.
    "a rank sends nothing once, on a ring": Planted(
        "ring", _sent(_at(9), 0.0, 1), says="as if rank 1 had sent nothing"
    ),
    "a rank sends nothing in every 25th step": Planted("ring", _sent(_every(25), 0.0, 1), _LONG),
    "all ranks send twice as much, on a ring": Planted("ring", _sent(_from(8), 2.0)),
    "a gradient is not cleared, on a ring": Planted("ring", lambda: _sealing(_with_earlier)),
    "a mean is divided once more": Planted("ring", lambda: _arriving(_from(8), _halve)),
    "the last element does not arrive": Planted("hub-aggregate", lambda: _arriving(_from(10), _own_last)),
    # The workers' own steps.
    "a rank takes no step": Planted("ring", lambda: one_rank_sits_out(9), says="on rank 1"),
    "old options across the barrier": Planted("ring", old_options, _CROSSING),
    "two steps across the barrier": Planted("ring", twice_across, _CROSSING),
    # The asynchronous hub.
    "an asynchronous push has the wrong sign": Planted(
        "hub-asp", _pushes(_at(9), _times(-1.0)), says="after push 8 to the hub"
    ),
    "an asynchronous hub halves all gradients": Planted("hub-asp", _pushes(_from(1), _times(0.5))),
    "an asynchronous push is applied twice": Planted("hub-asp", lambda: _repeated(2, 9)),
    "an asynchronous push is counted twice": Planted("hub-asp", lambda: _repeated(2, 9, counts=True)),
    "an asynchronous push is lost": Planted("hub-asp", lambda: _repeated(0, 9)),
    "an asynchronous hub ignores the schedule": Planted(
        "hub-asp", lambda: _on_hub(_first_learning_rate), _SCHEDULED
    ),
    "an asynchronous worker sends a wrong gradient": Planted(
        "hub-asp", _pushed(rank=1, number=7, factor=3.0), says="on rank 1"
    ),
    "an asynchronous hub forgets Adam's state": Planted(
        "hub-asp", lambda: _before_hub_steps(10, _forget), _ADAM
    ),
    "an asynchronous rank never pushes": Planted(
        "hub-asp", _pushed(rank=1), says="rank 1 has pushed 0 times"
    ),
    "a key is never pushed": Planted("hub-asp", _pushed(key=1), says="to key 1"),
    "an asynchronous rank drops a push": Planted("hub-asp", _pushed(rank=1, number=7), says="in 7 steps"),
    "an asynchronous rank drops its last push": Planted(
        "hub-asp", _pushed(rank=1, number=14), says="rank 1 has pushed 13 times"
    ),
    # Parameters of few bits.
    "a hub doubles a learning rate in bfloat16": Planted("hub-bsp", _of(_from(8), lr=2.0), _ROUNDED),
    "a hub loses a rank once in bfloat16": Planted("hub-bsp", _pushes(_at(9), _one_of), _ROUNDED),
    "a rank sends nothing once in bfloat16": Planted("ring", _sent(_at(9), 0.0, 1), _ROUNDED),
    # The script.
    "ranks train on the same samples": Planted(
        "ring", nullcontext, Script(deal=_same_samples), "trained on the same samples"
    ),
    "an uneven last batch": Planted(
        "hub-bsp", nullcontext, Script(last=7), "their gradients have the same weight"
    ),
}
