"""Freed memory is used again."""

from __future__ import annotations

import ctypes
import resource

import numpy as np
import pytest

from hubring.ps.transport.zmq.socket import keep_freed_memory

PAGE = 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_memory_of_earlier_messages_costs_no_page_faults() -> None:
    keep_freed_memory()
    size, blocks, rounds = 4 << 20, 4, 5

    def use() -> None:
        for held in [np.ones(size, np.uint8) for _ in range(blocks)]:
            assert held[-1]

    use()  # the first time, the pages are new
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        use()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < rounds * blocks * size // PAGE // 4
