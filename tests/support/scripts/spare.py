"""Skips the import of torch's compiler, which `torch.optim` imports with the first optimizer.

The import takes half of a short run. The scripts compile nothing: torch.optim uses the compiler only to
exclude functions.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def spare_compiler() -> None:
    """Replaces the compiler with a stub that returns every function unchanged."""
    compiler: Any = ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function
    compiler.graph_break = lambda: None
    compiler.trace_rules = SimpleNamespace(FORCE_SKIP_FILES=set())
    sys.modules[compiler.__name__] = torch._dynamo = compiler
