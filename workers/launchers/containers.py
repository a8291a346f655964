"""Kubernetes and Compose: one worker a container, and what a container can know of its own number.

A pod of an indexed Job, or of a JobSet of one such, has JOB_COMPLETION_INDEX. Where nothing else says the
rank, a pod's hostname does if it ends in a number, as a StatefulSet's `train-3`: one of up to four digits
is no accident, since random suffixes have five characters. How many pods there are stands in no variable,
so the server says it. A Compose replica's number stands in a label outside the container alone, so the
hub assigns its rank.
"""

from __future__ import annotations

import re

from hubring.workers.launchers.launcher_number import Environment, Family, Reading, read

_INDEX = "JOB_COMPLETION_INDEX"
_IN_A_POD = "KUBERNETES_SERVICE_HOST"
_ORDINAL = re.compile(r".+-(0|[1-9]\d{0,3})", re.ASCII)


def _started(environment: Environment) -> bool:
    return _INDEX in environment


def _read(environment: Environment) -> list[Reading]:
    return read(environment, {"rank": _INDEX})


def ordinal(environment: Environment, hostname: str) -> Reading | None:
    """A pod's number by its hostname; None outside of Kubernetes, and where the name has none."""
    match = _ORDINAL.fullmatch(hostname.partition(".")[0])
    if match is None or _IN_A_POD not in environment:
        return None
    return Reading("rank", int(match[1]), f"hostname {hostname}")


KUBERNETES = Family(
    "kubernetes",
    (_INDEX, _IN_A_POD),
    _started,
    _read,
    "Kubernetes tells a pod its index alone: give --world-size, or ps-server start --workers",
)
COMPOSE = Family(
    "compose",
    (),
    lambda _: False,
    lambda _: [],
    "a Compose replica cannot see its own number: the hub assigns its rank",
)
