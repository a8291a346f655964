"""What tests of the server share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import iscoroutinefunction

import pytest


@pytest.fixture(scope="module", params=["loops", "torch alone"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs all tests of a module as with llvmlite, and then as where it is not installed."""
    from hubring.ps.optim.sums import loops_work

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch alone":
            patch.setitem(sys.modules, "llvmlite", None)
            patch.setitem(sys.modules, "llvmlite.binding", None)
        loops_work.cache_clear()
        yield request.param
    loops_work.cache_clear()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on a loop of its own."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    from tests.support.fakes.coordinator import run

    names = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
