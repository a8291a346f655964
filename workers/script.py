"""A training script or module, which runs in this process as `python` runs it."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import UsageError
from hubring.ps.core.shadowed_packages import hidden_by
from hubring.ps.process.command import module_exists


class Script:
    """A script, or a module as for `python -m`.

    Args:
        name: The script's path, or the module's dotted name.
        is_module: Which of the two `name` is.
    """

    def __init__(self, name: str, is_module: bool) -> None:
        self._given, self._is_module = name, is_module
        self.name = name if is_module else Path(name).name
        """The name of the job."""
        self._folder = Path.cwd() if is_module else Path(name).resolve().parent

    def check(self) -> None:
        """Checks that the script can run.

        Raises:
            UsageError: The script does not exist, or a file beside it hides a package that Hubring needs.
        """
        if self._is_module and not module_exists(self._given):
            raise UsageError(f"module {self._given} not found in {self._folder} or in {sys.prefix}")
        if not self._is_module and not Path(self._given).is_file():
            raise UsageError(
                f"script {self._given} not found: pass an existing file, or job arguments after --"
            )
        if _searches_folder() and (hidden := hidden_by(self._folder)):
            raise UsageError(hidden)

    def run(self, arguments: list[str]) -> None:
        """Runs the script as `python script arguments` or `python -m module arguments` does."""
        if _searches_folder():
            if not sys.flags.safe_path:
                del sys.path[0]  # the folder of our own program
            sys.path.insert(0, str(self._folder))
        if self._is_module:
            sys.argv = [_file_of(self._given), *arguments]
            runpy.run_module(self._given, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [self._given, *arguments]
            runpy.run_path(self._given, run_name="__main__")


def _file_of(module: str) -> str:
    """Returns the file that `python -m` runs for a module; the name, if there is none."""
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{module}.__main__")
    return module if spec is None or spec.origin is None else os.path.abspath(spec.origin)


def _searches_folder() -> bool:
    """Whether Python searches the script's folder for modules. `PYTHONSAFEPATH` turns that off."""
    return not environment().get("PYTHONSAFEPATH")
