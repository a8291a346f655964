"""What each source file imports, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Import(NamedTuple):
    """One name that one file imports."""

    target: str
    """A file of ours, or the first name of another library."""
    runs: bool
    """False where only a type checker reads it."""
    at_start: bool
    """False within a function, which may never be called."""


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "hubring" else ("hubring", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TOPS = ("protos", "ps", "workers")
SOURCES = [*(path for top in TOPS for path in (ROOT / top).rglob("*.py"))]
SOURCES += [
    *(ROOT / "hubring").glob("*.py"),
    *(ROOT / "hubring" / "horovod").glob("*.py"),
]  # and not its links
FILES = {module(path): path for path in SOURCES}


@cache
def imports(name: str) -> tuple[Import, ...]:
    return tuple(walk(ast.parse(FILES[name].read_text()).body, runs=True, at_start=True))


def walk(nodes: Iterable[ast.AST], runs: bool, at_start: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node):
                yield Import(target, runs, at_start)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from walk(node.body, False, at_start)
            yield from walk(node.orelse, runs, at_start)
        else:
            within = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(statements_in(node), runs, at_start and not within)


def statements_in(node: ast.AST) -> list[ast.AST]:
    """The statements directly below a node, and what holds further ones, without the many expressions."""
    kinds = ast.stmt | ast.excepthandler | ast.match_case
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, kinds)]


def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    else:
        assert node.level == 0, f"{ast.unparse(node)}: imports are absolute here"
        found = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in found:
        yield max(with_packages(name), key=len, default=name.partition(".")[0])


def with_packages(name: str) -> list[str]:
    """The file and the packages above it, all of which an import runs."""
    parts = name.split(".")
    return [known for end in range(1, len(parts) + 1) if (known := ".".join(parts[:end])) in FILES]
