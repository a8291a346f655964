"""Loops are asked for once, and where there are none nobody is bothered with it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from hubring.ps.optim.fused_mean_step import one_pass
from hubring.ps.optim.hyperparameters import hyper_of, kwargs_of
from hubring.ps.optim.loops_available import work


@pytest.fixture
def no_llvmlite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    work.cache_clear()
    yield
    work.cache_clear()


@pytest.mark.usefixtures("no_llvmlite")
def test_without_llvmlite_one_line_says_that_torchs_kernels_serve_and_what_to_install(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    options = kwargs_of(hyper_of(torch.optim.SGD([torch.zeros(1)]).param_groups[0], "SGD"), "SGD")
    assert not work()
    assert one_pass("SGD", 2, options, finite=True) is None
    (record,) = caplog.records
    assert (record.levelname, record.message) == (
        "INFO",
        "optimizers use torch's slower kernels: llvmlite is not installed; install it with: pip install"
        " llvmlite, or in a clone of Hubring: pip install '.[fast]'",
    )
