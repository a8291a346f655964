"""A script that keeps views of gradients has Hubring use other memory, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.reports.report import TOPOLOGIES, Report, ends
from tests.reports.training import Job, batches, mlp, prepared, seeded, step, trained, values

CODECS = ["topk:0.3", "int8", "powersgd:1"]
CASES = [
    (name, codec)
    for name in ("hub", "aggregate", "ring")
    for codec in CODECS
    if (name, codec) != ("hub", "powersgd:1")
]
"""A hub that steps gets no factors."""


def keep(kept: list[Tensor], model: nn.Module) -> None:
    """Replaces the views that the script keeps by those of the gradients of today."""
    kept[:] = [one.grad.view(-1) for one in model.parameters() if one.grad is not None]
    assert kept


def assert_views_change_nothing(name: str, codec: str, script: Callable[[bool, Job], list[Tensor]]) -> None:
    """Runs the script with views of gradients kept, or not."""
    ranks = type(name, (TOPOLOGIES[name],), {"compress": codec})
    with_views, without = (ends(ranks, partial(script, keeps)) for keeps in (True, False))
    assert all(map(torch.equal, with_views, without))


@pytest.mark.parametrize(("name", "codec"), CASES)
def test_a_script_that_keeps_views_of_gradients_keeps_its_residuals(name: str, codec: str) -> None:
    """One rank keeps views. If it lost its residuals, its part would count differently."""

    def script(keeps: bool, job: Job) -> list[Tensor]:
        model, optimizer = prepared(job, mlp(4))
        kept: list[Tensor] = []
        for batch in [*batches()] * 3:
            step(job, model, optimizer, batch)
            if keeps and job.ranks == [1]:
                keep(kept, model)
        return values(model)

    assert_views_change_nothing(name, codec, script)


def test_buckets_that_travel_joined_move_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.workers.optimizer.parameters.BUCKET_BYTES", 64)

    def script(job: Job) -> list[Tensor]:
        kept: list[Tensor] = []
        model, optimizer = prepared(job, mlp(4), bucket_bytes=None)
        return trained(job, model, optimizer, after=lambda: keep(kept, model))

    Report("").check("", TOPOLOGIES["ring"], script)


@pytest.mark.parametrize("codec", CODECS)
def test_a_second_optimizers_gradients_move_apart_from_the_firsts(codec: str) -> None:
    def script(keeps: bool, job: Job) -> list[Tensor]:
        both = [prepared(job, seeded(lambda: nn.Linear(4, 4))) for _ in range(2)]
        kept: list[Tensor] = []
        for batch in batches():
            for model, optimizer in both:
                step(job, model, optimizer, batch)
            if keeps:
                keep(kept, model)
        return values(*(model for model, _ in both))

    assert_views_change_nothing("aggregate", codec, script)
