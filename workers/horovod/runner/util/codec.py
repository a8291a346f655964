"""Python objects as base64 text. Load only text that you trust: a pickle can run code."""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle

__all__ = ["dumps_base64", "loads_base64"]


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Returns the pickle of an object as base64; bytes if `to_ascii` is false."""
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Returns the object of `dumps_base64`."""
    return cloudpickle.loads(base64.b64decode(encoded))
