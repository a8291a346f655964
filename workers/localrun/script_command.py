"""The command line after `ps-run`'s flags: a script or a module, with or without `python` and its options."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from hubring.ps.core.errors import UsageError
from hubring.ps.process.command import module_exists

EXAMPLES = "for example: ps-run -np 2 train.py [ARGS]..., or ps-run -np 2 python -m package.train [ARGS]..."
_FLAGS = frozenset("bBdEIOPqsSuv")
_WITH_VALUE = frozenset("WX")


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """What each worker runs.

    Attributes:
        words: The script or the module, and its arguments.
        is_module: Whether the first word is a module.
        options: Options of the Python interpreter.
    """

    words: list[str]
    is_module: bool = False
    options: tuple[str, ...] = ()

    @property
    def safe_path(self) -> bool:
        """Whether Python must not search the script's folder: the options `-P` and `-I`."""
        return any(re.match("-[bBdEOqsSuv]*[PI]", option) for option in self.options)


def parse(command: list[str], *, is_module: bool = False) -> ScriptCommand:
    """Parses the command.

    Args:
        command: The words after `ps-run`'s flags.
        is_module: Whether `ps-run` itself got `-m`.

    Raises:
        UsageError: The command names no script or module, or one that does not exist.
    """
    parsed = _of_python(command) if _names_python(command) else ScriptCommand(command, is_module)
    _check(parsed)
    return parsed


def _names_python(command: list[str]) -> bool:
    return bool(command) and re.fullmatch(r"python(3(\.\d+)?)?", Path(command[0]).name) is not None


def other_python(command: list[str]) -> str:
    """Returns the interpreter that the command names, if it is of another environment; otherwise empty."""
    found = shutil.which(command[0]) if _names_python(command) else None
    return found if found and Path(found).parent != Path(sys.executable).parent else ""


def _of_python(command: list[str]) -> ScriptCommand:
    """Parses `python [OPTIONS] (SCRIPT | -m MODULE) [ARGS]`."""
    options: list[str] = []
    left = command[1:]
    while left and left[0].startswith("-") and left[0] != "-":
        word, *left = left
        letters = word[1:].lstrip("".join(_FLAGS))
        if not letters:
            options.append(word)
        elif letters[0] in _WITH_VALUE:
            options += [word] if letters[1:] else [word, *left[:1]]
            left = left if letters[1:] else left[1:]
        elif letters[0] == "m":
            flags, name = word.removesuffix(letters), letters[1:]
            options += [flags] if flags != "-" else []
            return ScriptCommand([name, *left] if name else left, True, tuple(options))
        else:
            raise UsageError(f"python {word}: ps-run starts a script or a module only; {EXAMPLES}")
    return ScriptCommand(left, options=tuple(options))


def _check(command: ScriptCommand) -> None:
    """Raises here what each worker would otherwise raise."""
    kind = "module" if command.is_module else "script"
    if not command.words or command.words[0].startswith("-"):
        found = f"{command.words[0]!r} is not a {kind}" if command.words else "the command line names none"
        raise UsageError(f"a {kind} is missing: {found}; {EXAMPLES}")
    name = command.words[0]
    if not command.is_module and not Path(name).is_file():
        raise UsageError(f"script {name} does not exist; {EXAMPLES}")
    if command.is_module and not module_exists(name):
        raise UsageError(f"module {name} does not exist in this folder or in {sys.prefix}; {EXAMPLES}")
