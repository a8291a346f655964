"""Parameters of the built-in job digits, whose shapes decide how a hub cuts the model."""

from __future__ import annotations

from hubring.workers.compare.cost.model.slicing import WIDTH

_PLAIN, _COMMON, _UNIT = 9_930, 4_810, 523
"""Parameters without a hidden layer, with one but without its units, and of each unit
(`hubring.workers.examples.digits.network`)."""


def tensors(job: str | None, model_bytes: int) -> tuple[int, ...]:
    """Returns the bytes of each parameter in the order of registration; empty: unknown.

    Args:
        job: Name of the job; None: a script.
        model_bytes: Bytes that a worker sends; within 1 % of those of the model.
    """
    if job != "digits":
        return ()
    units = max(1, round((model_bytes / WIDTH - _COMMON) / _UNIT))
    total = min((_PLAIN, _COMMON + _UNIT * units), key=lambda numel: abs(WIDTH * numel - model_bytes))
    if abs(WIDTH * total / model_bytes - 1) > 0.01:
        return ()
    convolutions = (16 * 9, 16, 32 * 16 * 9, 32)
    layers = (512 * 10, 10) if total == _PLAIN else (512 * units, units, 10 * units, 10)
    return tuple(WIDTH * numel for numel in (*convolutions, *layers))
