"""Addresses of servers, as settings hold them."""

from __future__ import annotations

import pytest

from hubring.ps.config.values import address
from hubring.ps.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("127.0.0.1:5555", ("127.0.0.1", 5555)),
        ("hub-0.hub:1", ("hub-0.hub", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_address_is_split(text: str, pair: tuple[str, int]) -> None:
    assert address(text) == pair


@pytest.mark.parametrize(
    "text",
    [
        *("", "hub", "hub:", ":5555", "hub:http", "hub:0", "hub:65536"),
        *("::1:5555", "[::1]", "http://hub:80", "a b:1"),
    ],
)
def test_address_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected HOST:PORT .* as in 127\.0\.0\.1:5555 or \[::1\]:5555"):
        address(text)
