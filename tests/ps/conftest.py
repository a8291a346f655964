"""What tests of the server share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["loops", "torch alone"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs all tests of a module as with llvmlite, and then as where it is not installed."""
    from hubring.ps.optim.loops_available import work

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch alone":
            patch.setitem(sys.modules, "llvmlite", None)
            patch.setitem(sys.modules, "llvmlite.binding", None)
        work.cache_clear()
        yield request.param
    work.cache_clear()
