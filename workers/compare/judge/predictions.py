"""The cost model's predictions and the measurements."""

from __future__ import annotations

from msgspec.structs import replace

from hubring.workers.compare.cost.built_in import tensors
from hubring.workers.compare.cost.measured import model_bytes
from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.prediction import Job
from hubring.workers.compare.cost.score import Score
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.judge.scaling import crossovers, scaling
from hubring.workers.compare.result.findings import Findings

OPTIMIZERS = {"char-lm": "adam"}
"""Optimizers of built-in jobs that do not use SGD."""


def predicted(found: Findings, constants: Constants | None) -> Findings:
    """Returns the findings with `predictions`, `score`, `crossover` and `scaling`.

    Args:
        found: The measured findings.
        constants: Of the machine or cluster of the runs; None: not measured. They are of Gloo, so runs with
            NCCL are not predicted.
    """
    settings, rows = found.settings, found.rows
    nbytes, scales = model_bytes(settings, rows), scaling(settings, rows)
    if constants is None or nbytes is None or found.asked.backend == "nccl":
        return replace(found, crossover=crossovers(settings, rows), scaling=scales)
    model = Score(settings, rows, constants, trained(found.asked, nbytes), found.asked.seeds)
    predictions = model.predictions()
    return replace(
        found,
        predictions=predictions,
        score=model.accuracy(predictions),
        crossover=crossovers(
            settings, rows, model.crossover if {"ring", "hub-bsp"} <= model.calibrated else None
        ),
        scaling=[*model.scaling(), *(each for each in scales if each.row not in model.calibrated)],
    )


def trained(experiment: Experiment, model_bytes: int) -> Job:
    """Returns what was trained, and the transport."""
    return Job(
        model_bytes=model_bytes,
        optimizer=OPTIMIZERS.get(experiment.job or "", "sgd"),
        wire="" if experiment.transport == "auto" else experiment.transport,
        together=True,
        slice_bytes=experiment.slice_bytes,
        tensors=tensors(experiment.job, model_bytes),
    )
