"""Kubernetes and Compose: one worker per container.

A pod of an indexed Job, or of a JobSet of one indexed Job, has JOB_COMPLETION_INDEX. If no other source gives
the rank, a pod's hostname gives it if it ends in a number, for example `train-3` of a StatefulSet. The number
can have up to four digits, since random suffixes have five characters. No variable holds the number of pods,
so the server supplies it. The number of a Compose replica is only in a label outside the container, so the
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
    """Returns the number at the end of a pod's hostname; None without one, and outside Kubernetes."""
    match = _ORDINAL.fullmatch(hostname.partition(".")[0])
    if match is None or _IN_A_POD not in environment:
        return None
    return Reading("rank", int(match[1]), f"hostname {hostname}")


KUBERNETES = Family(
    "kubernetes",
    (_INDEX, _IN_A_POD),
    _started,
    _read,
    "Kubernetes gives a pod only its index; set --world-size, or ps-server start --workers",
)
COMPOSE = Family(
    "compose",
    (),
    lambda _: False,
    lambda _: [],
    "a Compose replica cannot see its own number; the hub assigns its rank",
)
