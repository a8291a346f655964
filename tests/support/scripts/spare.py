"""Spares a test's script torch's compiler, which `torch.optim` imports with the first optimizer.

That takes as long as all else in a short run, and nothing here compiles anything:
the compiler is only ever asked to leave a function alone.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch


def spare_compiler() -> None:
    """Puts in the compiler's place what leaves every function alone."""
    compiler: Any = ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function
    compiler.graph_break = lambda: None
    sys.modules[compiler.__name__] = torch._dynamo = compiler
