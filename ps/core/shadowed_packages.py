"""Refuses a script's folder that hides a package which Hubring imports.

`python train.py` puts the script's folder first on the search path, so a file `torch.py`
there takes the place of torch, for everybody in the process.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = ("cloudpickle", "google", "grpc", "msgspec", "numpy", "safetensors", "torch", "zmq")
"""What Hubring imports beside a script, some of it late."""


def hidden_by(folder: Path) -> str:
    """Which package a file in this folder hides, in words; empty where none does.

    A package that is installed in this folder, and nowhere else, hides nothing.
    """
    for name in PACKAGES:
        hiding = _source(folder, name)
        if hiding is None or _comes_from_elsewhere(name, folder):
            continue
        elsewhere = [entry for entry in sys.path if Path(entry).resolve() != folder]
        if PathFinder.find_spec(name, elsewhere) is not None:
            return f"{hiding} hides the package {name}, which Hubring needs: rename it, or move the script"
    return ""


def _source(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.py", folder / name / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _comes_from_elsewhere(name: str, folder: Path) -> bool:
    """Whether it is imported already, and not from this folder: then nothing can hide it any more."""
    origin = getattr(sys.modules.get(name), "__file__", None)
    return origin is not None and folder not in Path(origin).resolve().parents
