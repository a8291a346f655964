"""Optional packages: the extra that installs each one, and the error message where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from hubring.ps.core.errors import ConfigError

EXTRAS = {
    "llvmlite": ("llvmlite", "fast"),
    "mpi4py": ("mpi4py", "peers-mpi"),
    "ray": ("ray", "ray"),
    "sklearn": ("scikit-learn", "demo"),
    "tensorboardX": ("tensorboardX", "demo"),
}
"""For each module, the package that contains it and an extra in pyproject.toml that requires the package."""

JOBS = {"digits": "sklearn"}
"""The built-in jobs that import an optional module."""


def missing(module: str) -> str:
    """Returns which package to install for a module of `EXTRAS`; empty if the module is installed."""
    return "" if find_spec(module) is not None else how_to_install(module)


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
