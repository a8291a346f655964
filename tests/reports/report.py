"""Runs the script of a public report on each topology, and compares it with torch in one process.

A script is a function of a `Job`. The reference runs it in one process with torch's own optimizer. That
process takes the batches of both ranks, and a step's loss is the mean of their losses. So it also gives the
values of `DistributedDataParallel` where ranks do different things: a parameter that one rank used has the
mean of that rank's gradient and zeros, and a parameter that no rank used has no gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial, update_wrapper
from typing import Any

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import HubringError
from tests.reports.training import SIZE, Job
from tests.support.training.ranks import HubRanks, LocalRanks, Ranks, RingRanks

Script = Callable[..., Sequence[Tensor]]
"""Trains in a `Job`, and returns what must be as under torch."""


class Hub(HubRanks):
    size = SIZE


class Aggregate(HubRanks):
    size = SIZE
    aggregate = True


class Ring(RingRanks):
    size = SIZE


TOPOLOGIES: dict[str, type[Ranks]] = {"hub": Hub, "aggregate": Aggregate, "ring": Ring, "alone": LocalRanks}


EVERYWHERE = " ".join(TOPOLOGIES)
NOT_RUN = "–"


@dataclass(frozen=True)
class Report:
    """What people reported, and what happens today.

    Attributes:
        number: The reports, as `owner/repository#number`, or the kind of script.
        expected: What the script should end with.
        on: The topologies on which it runs.
        refused: Where Hubring raises an error instead: patterns of the names of cases, which end with the
            topology.
        error: A pattern of that error's message.
        fails: Where the result is another one, as patterns too.
        reason: Why it fails.
        tolerance: Relative and absolute. If none is given, a single rank ends with torch's bits, and several
            near the sum over all samples: after a few steps in float32, the mean of their means is another.
    """

    number: str
    expected: str = "as torch"
    on: str = EVERYWHERE
    refused: str = ""
    error: str = ""
    fails: str = ""
    reason: str = ""
    tolerance: tuple[float, float] | None = None

    def check(self, case: str, topology: type[Ranks], script: Script) -> None:
        """Checks that this case ends as declared."""
        if _among(case, self.refused):
            with pytest.raises(HubringError, match=self.error):
                ends(topology, script)
        elif _among(case, self.fails):
            with pytest.raises((AssertionError, HubringError)):
                self._compare(topology, script)
            pytest.xfail(self.reason)
        else:
            self._compare(topology, script)

    def outcome(self, topology: str) -> str:
        """What the table says."""
        if topology not in self.on.split():
            return NOT_RUN
        words = {"**fails**": self.fails, "refused": self.refused}
        for word, patterns in words.items():
            if topology in [pattern.rpartition("-")[2] for pattern in patterns.split()]:
                return word
        return "ok"

    def _compare(self, topology: type[Ranks], script: Script) -> None:
        rtol, atol = self.tolerance or ((0.0, 0.0) if topology is LocalRanks else (1e-5, 1e-6))
        torch.testing.assert_close(ends(topology, script), list(script(Job(None))), rtol=rtol, atol=atol)


def report(*told: Any, often: str = "hub", **options: Any) -> Callable[[Script], Callable[..., None]]:
    """Makes a test of a script; the arguments are those of `Report`, and the first is its number.

    `make test` runs it on `often`, a hub that steps, where most can go wrong; `make test-full` on the others.
    It is the outermost decorator: a case is named after the script's own parameters, and then the topology.
    """
    row = Report(*told, **options)

    def decorate(script: Script) -> Callable[..., None]:
        def test(request: pytest.FixtureRequest, topology: type[Ranks], **variant: Any) -> None:
            row.check(request.node.callspec.id, topology, lambda job: script(job, **variant))

        update_wrapper(test, script)
        own = [one for one in inspect.signature(script).parameters.values() if one.name != "job"]
        given = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("request", "topology")]
        test.__signature__ = inspect.Signature([*own, *given])  # type: ignore[attr-defined]
        test.report = row  # type: ignore[attr-defined]
        marks = {name: [] if name in often.split() else [pytest.mark.full] for name in TOPOLOGIES}
        params = [pytest.param(TOPOLOGIES[name], id=name, marks=marks[name]) for name in row.on.split()]
        return pytest.mark.parametrize("topology", params)(test)

    return decorate


as_torch = partial(report, "", on="hub aggregate ring", often=EVERYWHERE)
"""The same for a script without a report, which `make test` runs on all that connects ranks."""


def _among(case: str, patterns: str) -> bool:
    """Whether one of the patterns matches the whole case, or what follows a dash in it."""
    return any(fnmatchcase(f"-{case}", f"*-{pattern}") for pattern in patterns.split())


def ends(topology: type[Ranks], script: Script) -> list[Tensor]:
    """What the script returns on all ranks, bit for bit."""
    first, *others = topology.run_once(lambda communicator: list(script(Job(communicator))))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True)), "ranks differ"
    return first
