"""The rooms of the house: every folder of `ps/` and `workers/`, and which folders it imports.

`pytest -rP -k table tests/test_layers.py` prints the table as it is measured.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import hubring
from hubring.workers import api

ROOT = Path(__file__).parent.parent

# A folder imports only what stands above it, and no more than is said here.
TABLE = """
protos
ps/core
ps/compression: ps/core
ps/optim: ps/core
ps/job: protos ps/core
ps/store: ps/compression ps/core ps/job ps/optim
ps/checkpoint: ps/core ps/store
ps/process: ps/core
ps/config: ps/core
ps/security: protos ps/config ps/core
ps/transport: protos ps/compression ps/config ps/core ps/security ps/store
ps/observe: protos ps/config ps/core ps/security ps/transport
ps/standby: protos ps/core ps/transport
ps/shard: protos ps/checkpoint ps/config ps/core ps/job ps/observe ps/optim ps/process ps/security ps/standby
    ps/store ps/transport
ps/client: protos ps/config ps/core ps/job ps/process ps/security ps/shard ps/transport
ps/coordinator: protos ps/checkpoint ps/config ps/core ps/job ps/observe ps/security ps/store ps/transport
ps/page: ps/config ps/coordinator ps/core ps/job ps/observe ps/security ps/transport
ps/recovery: protos ps/checkpoint ps/config ps/coordinator ps/core ps/job ps/process ps/security
ps/server.py: protos ps/checkpoint ps/config ps/coordinator ps/core ps/observe ps/page ps/process
    ps/recovery ps/security ps/shard ps/store ps/transport
ps/server_process.py: ps/config ps/core ps/observe ps/page ps/process ps/recovery ps/server.py
ps/submit: ps/config ps/core ps/process ps/security
ps/doctor: protos ps/checkpoint ps/config ps/core ps/process ps/security ps/transport
ps/cli.py: protos ps/checkpoint ps/config ps/core ps/doctor ps/observe ps/process ps/recovery ps/security
    ps/server.py
    ps/shard ps/submit ps/transport
workers/launchers: ps/core
workers/buckets: ps/core ps/job ps/store ps/transport
workers/communicators: ps/client ps/compression ps/core ps/job ps/store ps/transport workers/buckets
workers/slowdown: ps/core
workers/audit: workers/communicators
workers/runtime: ps/client ps/config ps/core ps/job ps/observe ps/optim ps/security ps/transport
    workers/audit workers/communicators workers/launchers workers/slowdown
workers/collectives: ps/core ps/store workers/communicators workers/runtime
workers/reducer: ps/core workers/buckets workers/communicators workers/runtime
workers/optimizer: ps/checkpoint ps/core ps/optim workers/buckets workers/collectives workers/communicators
    workers/reducer workers/runtime
workers/localrun: ps/checkpoint ps/config ps/core ps/job ps/process ps/security workers/launchers
    workers/runtime
workers/api.py: ps/core workers/collectives workers/localrun workers/optimizer workers/runtime
workers/horovod: ps/client ps/config ps/core ps/job workers/collectives workers/communicators
    workers/launchers workers/localrun workers/runtime
workers/peers: ps/config ps/core ps/optim ps/transport
workers/script.py: ps/config ps/core ps/process
workers/stop_signals.py: ps/core workers/runtime
workers/run_script.py: ps/config ps/core ps/job ps/observe workers/horovod workers/launchers workers/runtime
    workers/script.py workers/stop_signals.py
workers/compare: ps/client ps/config ps/core ps/job ps/observe ps/page ps/process ps/shard ps/store
    ps/transport workers/api.py workers/audit workers/buckets workers/collectives workers/communicators
    workers/launchers workers/optimizer workers/peers workers/run_script.py workers/runtime workers/slowdown
hubring: ps/config ps/core workers/api.py workers/collectives workers/horovod
workers/examples: hubring ps/core ps/process
workers/bench: hubring ps/compression ps/config ps/core ps/job ps/optim ps/process workers/communicators
    workers/compare workers/examples workers/peers
workers/programs: ps/config ps/core ps/observe ps/process ps/security workers/bench workers/horovod
    workers/launchers workers/localrun workers/run_script.py
"""

MOST_FILES = 20
MOST_LINES = 400

TOPOLOGIES = {
    f"hubring.workers.communicators.{name}" for name in ("hub", "ring.communicator", "ring.healing", "local")
}
RING = "hubring.workers.communicators.ring."
RULES = ("ps/compression", "ps/optim", "ps/store")
ALIVE = {"asyncio", "concurrent", "grpc", "multiprocessing", "queue", "select", "selectors", "signal"}
ALIVE |= {"socket", "socketserver", "subprocess", "threading", "time", "zmq"}
"""What has a socket, a process, a thread, a sleep or a clock."""


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
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


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
            yield from walk(ast.iter_child_nodes(node), runs, at_start and not within)


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


def reached(*names: str, at_start: bool = False) -> set[str]:
    """All that running these files brings in; `at_start` leaves out what functions import."""
    seen, unseen = set(), [known for name in names for known in with_packages(name)]
    while unseen:
        for found in imports(unseen.pop()):
            if found.runs and (found.at_start or not at_start) and found.target not in seen:
                seen.add(found.target)
                unseen += with_packages(found.target)
    return seen


def room(name: str) -> str:
    """The folder, `ps/core` say; of a file that stands in `ps/` or `workers/` itself its own path."""
    parts = FILES[name].relative_to(ROOT).parts
    return parts[0] if parts[0] in ("protos", "hubring") else "/".join(parts[:2])


def within(*rooms: str) -> set[str]:
    return {name for name in FILES if room(name) in rooms}


def measured() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {room(name): set() for name in FILES}
    for name in FILES:
        rooms[room(name)] |= {room(found.target) for found in imports(name) if found.target in FILES}
    return {name: found - {name} for name, found in rooms.items() if not name.endswith("__init__.py")}


def test_table_of_folders_is_what_they_import() -> None:
    said = {
        name: set(words.split())
        for name, _, words in (
            line.partition(":") for line in TABLE.strip().replace("\n    ", " ").splitlines()
        )
    }
    found = measured()
    order = list(said)
    for name in sorted(found, key=lambda each: order.index(each) if each in order else len(order)):
        print(f"{name}: {' '.join(sorted(found[name]))}".rstrip(": "))
    assert found == said
    for name, below in said.items():
        assert not [each for each in below if order.index(each) > order.index(name)], f"{name} looks down"


def test_no_folder_and_no_file_grows_too_large() -> None:
    made = {path for path in FILES.values() if "_pb2" in path.name}
    files = [path for path in FILES.values() if path not in made]
    counts = Counter(path.parent for path in files)
    crowded = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    sources = [*files, *(ROOT / "tests").rglob("*.py")]
    long = {path: lines for path in sources if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert (crowded, long) == ({}, {})


def test_no_test_imports_what_stands_in_another_test() -> None:
    shared = re.compile(r"(?:from|import) tests[\w.]*\.test_\w+")
    files = (ROOT / "tests").rglob("*.py")
    assert {path: found for path in files if (found := shared.findall(path.read_text()))} == {}


def test_client_and_server_never_reach_each_other() -> None:
    client, coordinator = within("ps/client"), within("ps/coordinator", "ps/server.py")
    server = coordinator | {f"hubring.ps.shard.{name}" for name in ("loop", "control_service", "process")}
    assert client
    assert not reached(*client) & server
    assert not reached(*server) & client


def test_only_one_file_names_a_topology() -> None:
    naming = {name for name in FILES for found in imports(name) if found.target in TOPOLOGIES - {name}}
    assert {name for name in naming if RING not in name} == {"hubring.workers.runtime.topology"}


def test_coordinator_and_health_check_run_without_torch() -> None:
    assert "torch" not in reached(*within("ps/coordinator", "ps/server.py", "ps/page"))
    assert "torch" not in reached("hubring.ps.observe.health_check")


def test_help_comes_without_torch() -> None:
    programs = [entry.partition(":")[0] for entry in SETTINGS["project"]["scripts"].values()]
    assert len(programs) == 4
    assert "torch" not in reached(*programs, at_start=True)


def test_a_prediction_comes_without_torch() -> None:
    cost = "hubring.workers.compare.cost"
    asked = [f"{cost}.{name}" for name in ("cli", "question", "screen", "calibrations")]
    assert "torch" not in reached(*asked, at_start=True)


def test_what_is_imported_late_is_not_imported_at_the_start() -> None:
    assert not reached("hubring.ps.server", at_start=True) & {"jinja2", "starlette", "uvicorn"}
    loops = "hubring.ps.optim.llvm_loops"
    assert "llvmlite" in reached(loops, at_start=True)
    assert "llvmlite" not in reached(*(FILES.keys() - {loops}), at_start=True)


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = {
        name: {
            found.target for found in imports(name) if found.target in FILES and found.runs and found.at_start
        }
        for name in FILES
    }
    assert len([*TopologicalSorter({name: below - {name} for name, below in graph.items()}).static_order()])


def test_rules_hold_no_socket_thread_sleep_or_clock() -> None:
    assert all(within(each) for each in RULES)
    assert {name: alive for name in within(*RULES) if (alive := reached(name) & ALIVE)} == {}


def test_only_wire_knows_what_messages_mean() -> None:
    messages = "hubring.ps.core.messages"
    knowing = {name for name in within("ps/transport") for found in imports(name) if found.target == messages}
    assert knowing == {"hubring.ps.transport.wire", "hubring.ps.transport.payload"}


def test_one_package_is_installed_and_it_links_to_the_others() -> None:
    assert SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["hubring"]
    package = Path(hubring.__file__).parent
    links = {path.name: str(path.readlink()) for path in package.iterdir() if path.is_symlink()}
    assert links == {top: f"../{top}" for top in TOPS}
    assert not {path.stem for path in package.iterdir()} & set(api.__all__), "a module hides a name"
