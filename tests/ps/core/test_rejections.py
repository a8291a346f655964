from __future__ import annotations

import logging

import pytest

from hubring.ps.core.bounds import Rejections


def test_a_flood_is_counted_and_hardly_logged(caplog: pytest.LogCaptureFixture) -> None:
    rejections, log = Rejections(), logging.getLogger("hubring.test")
    for _ in range(1000):
        rejections.add("header", log, "refused a header of 9 bytes; the maximum is 8")
    rejections.add("parts", log, "refused a message of 3 parts")
    assert rejections.counts() == {"header": 1000, "parts": 1}
    assert len(caplog.messages) == 11
    assert caplog.messages[-2:] == [
        "refused a header of 9 bytes; the maximum is 8 (512 times since the start)",
        "refused a message of 3 parts",
    ]
