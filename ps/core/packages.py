"""Packages that Hubring needs: the extra that installs one, and a file of the script that hides one.

`python train.py` puts the script's folder first on the search path. A file `torch.py` there replaces
torch for the whole process.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from hubring.ps.core.errors import ConfigError

EXTRAS = {
    "llvmlite": ("llvmlite", "fast"),
    "mpi4py": ("mpi4py", "peers-mpi"),
    "ray": ("ray", "ray"),
    "sklearn": ("scikit-learn", "demo"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
}
"""For each module, the package that contains it and an extra in pyproject.toml that requires the package."""

JOBS = {"digits": "sklearn"}
"""The built-in jobs that import an optional module."""


def missing(module: str) -> str:
    """Returns which package to install for a module of `EXTRAS`; empty if the module is installed."""
    found = find_spec(module)
    # A folder of that name, such as W&B's own `wandb/`, is found too, and has no origin.
    return "" if found is not None and found.origin else how_to_install(module)


def how_to_install(module: str) -> str:
    """Returns the error message for a missing module of `EXTRAS`."""
    package, extra = EXTRAS[module]
    return (
        f"{package} is not installed; install it with: pip install {package},"
        f" or in a clone of Hubring: pip install '.[{extra}]'"
    )


def require(module: str, what: str) -> None:
    """Checks that a module of `EXTRAS` is installed.

    Args:
        module: The module.
        what: What imports the module; begins the error message.

    Raises:
        ConfigError: The module is not installed.
    """
    if text := missing(module):
        raise ConfigError(f"{what}: {text}")


def require_for_job(job: str | None) -> None:
    """Checks that a built-in job can import its packages; None is a script, which may import anything.

    Raises:
        ConfigError: A package is not installed.
    """
    if job in JOBS and (text := missing(JOBS[job])):
        raise ConfigError(f"job {job}: {text}; or use --job char-lm, which needs no extra package")


NEWEST_TORCH = "2.14"
"""The newest release of torch that `.ci/run` tests."""

TESTED_TORCH = f"pip install 'torch=={NEWEST_TORCH}.*'"
"""The command that installs it."""


def untested_torch(version: str) -> str:
    """Returns a warning if this release of torch is newer than the tested ones, else an empty string."""
    from packaging.version import Version  # here: `import hubring` must not take its time

    if Version(version).release[:2] <= Version(NEWEST_TORCH).release:
        return ""
    return (
        f"torch {version} is newer than torch {NEWEST_TORCH}, the newest release that Hubring was tested with"
    )


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
