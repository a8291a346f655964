"""What no file may do, found by walking every syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = [
    path for top in ("protos", "ps", "workers", "deploy") for path in sorted((ROOT / top).rglob("*.py"))
]
PROGRAM += sorted([*(ROOT / "hubring").glob("*.py"), *(ROOT / "hubring" / "horovod").glob("*.py")])
FILES = [*PROGRAM, *sorted((ROOT / "tests").rglob("*.py"))]
ENVIRONMENT_READER = ROOT / "ps" / "config" / "environment.py"

# Each of these runs what a stranger wrote, if a stranger wrote the bytes.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch.serialization",
}
CALLS = {"eval", "exec", "torch.load", "torch.save", "torch.jit.load", "numpy.load", "np.load", "yaml.load"}
TRUSTING = {
    # Horovod's object functions: ranks of one job open what the others pickled, and the docstring says so.
    "workers/horovod/functions.py": "pickle",
    # A worker's state, which it has sent itself: torch.load reads tensors and plain values only.
    "workers/optimizer/own_state.py": "",
    "tests/system/test_own_state.py": "torch.load",
    "tests/support/scripts/own_state.py": "torch.save",
    # A function that a script has called on its own child processes, which answer by a pipe of its own.
    "workers/horovod/run_function.py": "cloudpickle",
    # The doctor's own child processes, which answer by a pipe of its own.
    "ps/doctor/checks.py": "pickle",
    "workers/localrun/functions.py": "cloudpickle",
    # Workers of one comparison, which has started them all, exchange parts of collectives as torch would.
    "workers/compare/run/peers/grouped.py": "all_gather_object",
    # The test of a group calls torch's object collectives, as scripts do.
    "tests/workers/torch_backend/scripts.py": "all_gather_object",
    # Runs the user's script, as Python does.
    "workers/run_script.py": "exec",
    # Runs the code after `-c` that a test has given it, as Python does.
    "tests/support/processes/fork_server.py": "exec",
    # Tests read what they have just written.
    "tests/reports/test_optimizer_state.py": "",
    "tests/reports/test_gradients.py": "",
    "tests/support/scripts/every_change.py": "torch.save",
    "tests/system/test_every_change.py": "torch.load",
    # The tutorial's scripts save as ordinary scripts do; torch.load reads tensors and plain values only.
    "workers/examples/tutorial_before.py": "torch.",
    "workers/examples/tutorial_after.py": "torch.",
    # An unedited script of somebody else's, which writes its checkpoint as such scripts do.
    "tests/workers/horovod/published.py": "torch.save",
}
OBJECT_COLLECTIVES = ("_object", "_object_list")
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, else what it comes closest to."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def placed(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Every import, name and whatever else has a line."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt))


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Each import or use of something that can run what it reads."""
    for node in placed(tree):
        for name in imported(node):
            if name in MODULES | CALLS or name.partition(".")[0] in MODULES:
                yield f"line {node.lineno}: import of {name}"
        name = dotted(node)
        if name in CALLS or name.partition(".")[0] in MODULES:
            yield f"line {node.lineno}: {name}"
        if name.startswith(("dist.", "torch.distributed.")) and name.endswith(OBJECT_COLLECTIVES):
            yield f"line {node.lineno}: {name} pickles"


def environment(tree: ast.AST) -> Iterator[str]:
    """Each touch of the process's environment."""
    for node in placed(tree):
        for name in [dotted(node), *imported(node)]:
            if name in ENVIRONMENT:
                yield f"line {node.lineno}: {name}"


def found_in(files: list[Path], walk: Callable[[ast.AST], Iterator[str]]) -> Iterator[str]:
    """What a walk finds in these files, each as file, line and name."""
    for path in files:
        name = str(path.relative_to(ROOT))
        for one in walk(ast.parse(path.read_text())):
            yield f"{name}: {one}"


def trusted(one: str) -> bool:
    return any(one.startswith(f"{name}: ") and allowed in one for name, allowed in TRUSTING.items())


def test_no_file_runs_what_it_reads_but_those_that_trust_its_writer() -> None:
    found = list(found_in(FILES, unsafe))
    assert [one for one in found if not trusted(one)] == []
    assert {name for name in TRUSTING if not any(one.startswith(f"{name}: ") for one in found)} == set()


def test_only_config_reads_the_environment() -> None:
    program = [path for path in PROGRAM if not path.name.startswith("with_")]  # scripts of a user
    readers = {one.partition(": ")[0] for one in found_in(program, environment)}
    assert readers == {str(ENVIRONMENT_READER.relative_to(ROOT))}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import torch, marshal",
        "from shelve import open",
        "from torch import load",
        "def f(path):\n    return torch.load(path)",
        "reader = np.load",
        "exec(text)",
        "x = [eval(text)]",
        "dist.broadcast_object_list(objects)",
    ],
)
def test_walk_finds_what_is_unsafe(text: str) -> None:
    assert list(unsafe(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["os.environ['A']", "from os import environ", "def f(): return os.getenv('A')"]
)
def test_walk_finds_a_reader_of_the_environment(text: str) -> None:
    assert list(environment(ast.parse(text)))
