"""Detects a file in the script's folder that hides a package which Hubring imports.

`python train.py` puts the script's folder first on the search path. A file `torch.py`
there replaces torch for the whole process.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = ("cloudpickle", "google", "grpc", "msgspec", "numpy", "safetensors", "torch", "zmq")
"""Packages that Hubring imports, some of them late."""


def hidden_by(folder: Path) -> str:
    """Returns an error message if a file in this folder hides a package, else an empty string.

    A package that is installed only in this folder hides nothing.
    """
    for name in PACKAGES:
        hiding = _source(folder, name)
        if hiding is None or _comes_from_elsewhere(name, folder):
            continue
        elsewhere = [entry for entry in sys.path if Path(entry).resolve() != folder]
        if PathFinder.find_spec(name, elsewhere) is not None:
            return (
                f"{hiding} hides the package {name}, which Hubring needs; rename the file or move the script"
            )
    return ""


def _source(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.py", folder / name / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _comes_from_elsewhere(name: str, folder: Path) -> bool:
    """Whether the package is already imported from another folder, so that nothing can hide it."""
    origin = getattr(sys.modules.get(name), "__file__", None)
    return origin is not None and folder not in Path(origin).resolve().parents
