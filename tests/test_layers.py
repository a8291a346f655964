"""The rooms of the house: every folder of `ps/` and `workers/`, and which folders it imports.

`pytest -rP -k table tests/test_layers.py` prints the table as it is measured.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

from torch.utils._device import _device_constructors

import hubring
from hubring.workers import api
from tests.support.imports import FILES, ROOT, TOPS, imports, with_packages

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
ps/transport: protos ps/compression ps/config ps/core ps/security
ps/observe: protos ps/config ps/core
ps/shard: protos ps/checkpoint ps/config ps/core ps/job ps/observe ps/optim ps/process ps/security ps/store
    ps/transport
ps/client: protos ps/config ps/core ps/job ps/process ps/security ps/shard ps/transport
ps/coordinator: protos ps/checkpoint ps/config ps/core ps/job ps/observe ps/security ps/store ps/transport
ps/page: ps/config ps/coordinator ps/core ps/job ps/observe ps/security ps/transport
ps/recovery: protos ps/config ps/coordinator ps/core ps/job ps/process ps/security
ps/server.py: protos ps/checkpoint ps/config ps/coordinator ps/core ps/observe ps/page ps/process
    ps/recovery ps/security ps/shard ps/store ps/transport
ps/server_process.py: ps/config ps/core ps/observe ps/page ps/process ps/recovery ps/server.py
ps/submit: ps/config ps/core ps/process ps/security
ps/doctor: protos ps/checkpoint ps/config ps/core ps/process ps/security ps/transport
ps/cli.py: protos ps/checkpoint ps/config ps/core ps/doctor ps/observe ps/process ps/recovery ps/security
    ps/server.py ps/shard ps/store ps/submit ps/transport
workers/launchers: ps/core
workers/buckets: ps/compression ps/core ps/transport
workers/communicators: ps/client ps/compression ps/core ps/job ps/store ps/transport workers/buckets
workers/audit: ps/core ps/optim workers/buckets workers/communicators
workers/runtime: ps/client ps/config ps/core ps/job ps/observe ps/optim ps/security ps/transport
    workers/audit workers/communicators workers/launchers
workers/collectives: ps/core ps/store workers/communicators workers/runtime
workers/reducer: ps/core ps/optim workers/buckets workers/communicators workers/runtime
workers/optimizer: ps/checkpoint ps/client ps/core ps/optim workers/buckets workers/collectives
    workers/communicators workers/reducer workers/runtime
workers/localrun: ps/checkpoint ps/config ps/core ps/job ps/process ps/security workers/launchers
    workers/runtime
workers/torch_backend: ps/compression ps/config ps/core ps/job ps/observe ps/process ps/security
    ps/transport workers/communicators workers/launchers workers/localrun workers/runtime
workers/api.py: ps/core workers/collectives workers/localrun workers/optimizer workers/runtime
    workers/torch_backend
workers/horovod: ps/client ps/config ps/core ps/job workers/collectives workers/communicators
    workers/launchers workers/localrun workers/runtime
workers/peers: ps/config ps/core ps/optim ps/process ps/transport
workers/run_script.py: ps/config ps/core ps/job ps/observe ps/process workers/horovod workers/launchers
    workers/runtime
workers/compare: ps/client ps/config ps/core ps/job ps/observe ps/page ps/process ps/shard ps/store
    ps/transport workers/api.py workers/audit workers/buckets workers/collectives workers/communicators
    workers/launchers workers/optimizer workers/peers workers/run_script.py workers/runtime
hubring: ps/config ps/core workers/api.py workers/collectives workers/horovod
workers/examples: hubring ps/core ps/process
workers/bench: hubring ps/compression ps/config ps/core ps/job ps/optim ps/process workers/communicators
    workers/examples workers/peers
workers/programs: ps/config ps/core ps/observe ps/process ps/security workers/bench workers/horovod
    workers/launchers workers/localrun workers/run_script.py workers/runtime
"""

MOST_FILES = 20
MOST_LINES = 400

TOPOLOGIES = {
    f"hubring.workers.communicators.{name}"
    for name in ("hub", "ring.communicator", "ring.healing_ring", "local")
}
RING = "hubring.workers.communicators.ring."
RULES = ("ps/compression", "ps/optim", "ps/store")
ALIVE = {"asyncio", "concurrent", "grpc", "multiprocessing", "queue", "select", "selectors", "signal"}
ALIVE |= {"socket", "socketserver", "subprocess", "threading", "time", "zmq"}
"""What has a socket, a process, a thread, a sleep or a clock."""


PROGRAMS = ("bench", "compare", "examples", "peers")
"""What scripts do not run with."""
FLOATING = {f"torch.{name}" for name in ("empty", "eye", "full", "ones", "rand", "randn", "zeros")}
"""What makes floats of the default dtype."""

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def reached(*names: str, at_start: bool = False) -> set[str]:
    """All that running these files brings in; `at_start` leaves out what functions import."""
    seen, unseen = set(), [known for name in names for known in with_packages(name)]
    while unseen:
        for found in imports(unseen.pop()):
            if found.runs and (found.at_start or not at_start) and found.target not in seen:
                seen.add(found.target)
                unseen += with_packages(found.target)
    return seen


def test_the_first_use_of_hubring_does_not_wait_for_torchs_dtensor() -> None:
    """It takes twice as long to import as all of Hubring, and only the audit needs it."""
    reached_at_start = reached("hubring.workers.api", "hubring.workers.run_script", at_start=True)
    assert "torch" in reached_at_start
    assert not any(name.startswith("torch.distributed.tensor") for name in reached_at_start)


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
    assert "torch" not in reached("hubring.ps.observe.health")


def test_help_comes_without_torch() -> None:
    programs = [entry.partition(":")[0] for entry in SETTINGS["project"]["scripts"].values()]
    assert len(programs) == 4
    assert "torch" not in reached(*programs, at_start=True)


def test_a_prediction_comes_without_torch() -> None:
    cost = "hubring.workers.compare.predict"
    asked = [f"{cost}.{name}" for name in ("cli", "question", "screen", "calibrations")]
    assert "torch" not in reached(*asked, at_start=True)


def test_late_imports_are_not_imported_at_the_start() -> None:
    assert not reached("hubring.ps.server", at_start=True) & {"jinja2", "starlette", "uvicorn"}
    loops = "hubring.ps.optim.llvm_loops"
    assert "llvmlite" in reached(loops, at_start=True)
    assert "llvmlite" not in reached(*(FILES.keys() - {loops}), at_start=True)


def test_rules_hold_no_socket_thread_sleep_or_clock() -> None:
    assert all(within(each) for each in RULES)
    assert {name: alive for name in within(*RULES) if (alive := reached(name) & ALIVE)} == {}


def test_only_wire_knows_what_messages_mean() -> None:
    messages = "hubring.ps.core.messages"
    knowing = {name for name in within("ps/transport") for found in imports(name) if found.target == messages}
    assert knowing == {"hubring.ps.transport.encode", "hubring.ps.transport.decode"}


def test_each_tensor_that_we_make_has_a_device() -> None:
    """A script's `torch.set_default_device` and `torch.set_default_dtype` are for its own tensors."""
    makers = {f"torch.{one.__name__}" for one in _device_constructors()}
    own = within(*{room(name) for name in FILES} - {f"workers/{name}" for name in PROGRAMS})
    lacking = []
    for name in own:
        for node in ast.walk(ast.parse(FILES[name].read_text())):
            if isinstance(node, ast.Call) and (maker := ast.unparse(node.func)) in makers:
                needed = {"device", "dtype"} if maker in FLOATING else {"device"}
                if not needed <= {word.arg for word in node.keywords}:
                    lacking.append(f"{FILES[name]}:{node.lineno}")
    assert lacking == []


def test_one_package_is_installed_and_it_links_to_the_others() -> None:
    assert SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["hubring"]
    package = Path(hubring.__file__).parent
    links = {path.name: str(path.readlink()) for path in package.iterdir() if path.is_symlink()}
    assert links == {top: f"../{top}" for top in TOPS}
    assert not {path.stem for path in package.iterdir()} & set(api.__all__), "a module hides a name"
