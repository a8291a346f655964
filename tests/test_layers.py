"""Who may import whom. A file may import what stands below its floor, or before it on its own floor."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import workers

ROOT = Path(__file__).parent.parent

# From the ground up. A name may stand here before its file does; a file that stands nowhere fails.
# `*` is a folder whose files may import each other.
FLOORS = {
    "wire format": "protos protos.*",
    "words": """
        ps ps.errors ps.types ps.messages ps.timing ps.waiting ps.work ps.traffic ps.service ps.usage
        ps.offset ps.kernel ps.pace ps.trace ps.codecs ps.settings ps.config ps.config.*
        ps.logs ps.journal ps.terminal ps.markup ps.huge
    """,
    "rules": """
        ps.zeros ps.reduction ps.collective
        ps.sharding ps.consistency ps.membership ps.ledger
        ps.finite ps.hyper ps.vectors ps.sums ps.fused ps.onepass ps.optim ps.blocks ps.rounds
        ps.quantization ps.sparsification ps.compression ps.feedback
        ps.placement ps.home ps.snapshot ps.entry ps.refusals ps.stats ps.store ps.job
    """,
    "wires": """
        ps.transport ps.transport.base ps.transport.memory ps.transport.host ps.transport.interface
        ps.transport.probe
        ps.transport.bundle ps.transport.wire ps.transport.heap ps.transport.channel ps.transport.frame
        ps.transport.outbox ps.transport.backlog ps.transport.bell ps.transport.poller ps.transport.doorbell
        ps.transport.pages ps.transport.copies ps.transport.segment ps.transport.packet ps.transport.window
        ps.transport.ipc
        ps.transport.inproc ps.transport.grpc_listener ps.transport.grpc
        ps.transport.zmq_socket ps.transport.zmq_listener ps.transport.zmq ps.transport.shm
        ps.transport.registry ps.transport.conformance
    """,
    "processes": """
        ps.plans ps.manifest ps.claim ps.checkpoint ps.shard_command ps.gpu ps.companion ps.lookout ps.health
        ps.lead ps.cork ps.lines ps.client ps.session
        ps.shard ps.shard_control ps.shard_process
        ps.fleet ps.supply ps.saver ps.keeper ps.status ps.tally ps.ending ps.blueprint
        ps.changes ps.planner ps.coordinator ps.control ps.metrics ps.page* ps.server
        ps.doctor* ps.submit* ps.probe ps.cli
    """,
    "training": """
        workers.accelerator workers.courier workers.pinning workers.staging
        workers.layout workers.bucketing workers.group workers.communicator workers.launchers* workers.launch
        workers.own_device workers.record workers.trainer workers.finite workers.kept
        workers.local_communicator workers.ring_group workers.ring_work workers.ring workers.ring_collectives
        workers.agenda workers.team workers.transfers
        workers.coder workers.powersgd workers.ring_mean
        workers.allreduce_communicator workers.convoy workers.flight workers.exchange workers.tuning
        workers.slicing workers.placing workers.roll workers.ps_communicator
        workers.compare workers.compare.setting workers.compare.hardship workers.compare.hardship.delays
        workers.hardship
        workers.context workers.sparse workers.collectives* workers.checkpoints workers.sampler
        workers.watch workers.backward workers.forward workers.stepper
        workers.scaling workers.turnout workers.wrapping workers.optimizer
        workers.launcher workers.launcher.idle workers.launcher.host workers.launcher.server
        workers.launcher.stream workers.launcher.team workers.launcher.job
        workers.horovod.errors workers.horovod.ops workers.horovod.compression workers.horovod.hosts
        workers.horovod.handles workers.horovod.timeline workers.horovod.world workers.horovod.process_set
        workers.horovod.variables workers.horovod.lifecycle workers.horovod.topology
        workers.horovod.capability workers.horovod.waiting workers.horovod.reduction workers.horovod.sendable
        workers.horovod.allreduce workers.horovod.allgather workers.horovod.broadcast
        workers.horovod.alltoall workers.horovod.reducescatter workers.horovod.sparse
        workers.horovod.meeting workers.horovod.objects workers.horovod.parameters
        workers.horovod.parcel workers.horovod.passes workers.horovod.gradients workers.horovod.trainer
        workers.horovod.adasum workers.horovod.optimizer workers.horovod.sync_batch_norm
        workers.horovod.elastic.board workers.horovod.elastic.membership
        workers.horovod.elastic.sampler workers.horovod.elastic.state
        workers.horovod.elastic.torch_state workers.horovod.elastic.run workers.horovod.elastic
        workers.horovod workers.horovod.build workers.horovod.alias
        workers.horovod.call workers.horovod.several
        workers.launcher.cli
        workers.api workers workers.examples* workers.run workers.crew workers.on_ray workers.explain
        workers.compare* workers.bench* workers.cli
    """,
}
NAMES = [name for floor in FLOORS.values() for name in floor.split()]

CLIENT = {"ps.lines", "ps.client", "ps.session"}
COORDINATOR = {
    "ps.server",
    "ps.control",
    "ps.coordinator",
    "ps.blueprint",
    "ps.changes",
    "ps.ending",
    "ps.fleet",
    "ps.health",
    "ps.keeper",
    "ps.metrics",
    "ps.planner",
    "ps.supply",
    "ps.saver",
    "ps.status",
    "ps.tally",
}
SERVER = COORDINATOR | {"ps.shard", "ps.shard_control", "ps.shard_process"}
TOPOLOGIES = {"workers.ps_communicator", "workers.allreduce_communicator", "workers.local_communicator"}
ALIVE = {"asyncio", "concurrent", "grpc", "multiprocessing", "queue", "select", "selectors", "signal"}
ALIVE |= {"socket", "socketserver", "subprocess", "threading", "time", "zmq"}
"""What has a socket, a process, a thread, a sleep or a clock."""


class Import(NamedTuple):
    """One name that one file imports."""

    target: str
    """A file of ours, or the first name of another library."""
    line: int
    runs: bool
    """False where only a type checker reads it."""
    at_start: bool
    """False within a function, which may never be called."""


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module(path): path for top in ("protos", "ps", "workers") for path in sorted((ROOT / top).rglob("*.py"))
}


SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAMS = [entry.partition(":")[0] for entry in SETTINGS["project"]["scripts"].values()]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(), str(FILES[name]))


@cache
def imports(name: str) -> tuple[Import, ...]:
    return tuple(walk(tree(name).body, runs=True, at_start=True))


def walk(nodes: Iterable[ast.AST], runs: bool, at_start: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node):
                yield Import(target, node.lineno, runs, at_start)
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
        assert node.module is not None
        assert node.level == 0, f"from {'.' * node.level}{node.module}: imports are absolute here"
        found = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in found:
        yield max(with_packages(name), key=len, default=name.partition(".")[0])


def place(name: str) -> int:
    """Where in NAMES the file stands."""
    fitting = [index for index, known in enumerate(NAMES) if fnmatch(name, known)]
    assert fitting, f"{name} is on no floor: give it a place in FLOORS"
    return fitting[0]


def reached(name: str, *, at_start: bool = False) -> set[str]:
    """All that running `name` brings in, files of ours and libraries.

    Importing `a.b` runs `a` too. `at_start` leaves out what functions import.
    """
    seen, unseen = set(), with_packages(name)
    while unseen:
        for found in imports(unseen.pop()):
            if found.runs and (found.at_start or not at_start) and found.target not in seen:
                seen.add(found.target)
                unseen += with_packages(found.target)
    return seen


def with_packages(name: str) -> list[str]:
    return [known for known in FILES if name == known or name.startswith(f"{known}.")]


def present(names: Iterable[str]) -> list[str]:
    return sorted(FILES.keys() & set(names))


@pytest.mark.parametrize("name", FILES)
def test_file_imports_only_from_below(name: str) -> None:
    here = place(name)
    wrong = [
        f"{FILES[name].relative_to(ROOT)}:{found.line} imports {found.target}"
        for found in imports(name)
        if found.target in FILES and found.target != name and place(found.target) > here
    ]
    assert not wrong


def test_client_and_server_never_reach_each_other() -> None:
    assert {name: both for name in present(CLIENT) if (both := reached(name) & SERVER)} == {}
    assert {name: both for name in present(SERVER) if (both := reached(name) & CLIENT)} == {}


def test_only_the_context_names_a_topology() -> None:
    naming = {name for name in FILES for found in imports(name) if found.target in TOPOLOGIES - {name}}
    assert naming == {"workers.context"}


def test_coordinator_runs_without_torch() -> None:
    assert [name for name in present(COORDINATOR) if "torch" in reached(name)] == []


def test_a_probe_runs_without_torch() -> None:
    assert "torch" not in reached("ps.probe")


@pytest.mark.parametrize("name", present(PROGRAMS))
def test_help_comes_without_torch(name: str) -> None:
    assert "torch" not in reached(name, at_start=True)


def test_rules_hold_no_socket_thread_sleep_or_clock() -> None:
    rules = present(FLOORS["rules"].split())
    assert rules
    assert {name: alive for name in rules if (alive := reached(name) & ALIVE)} == {}


def test_only_wire_knows_what_messages_mean() -> None:
    wires = present(FLOORS["wires"].split())
    knowing = {name for name in wires for found in imports(name) if found.target == "ps.messages"}
    assert knowing == {"ps.transport.wire"}


def test_no_test_is_installed_and_all_else_is() -> None:
    shipped = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(shipped) == {name.partition(".")[0] for name in FILES}


def test_no_file_hides_a_name_that_scripts_use() -> None:
    """Importing `workers.NAME` would put the module in the place of `workers.NAME()`."""
    assert not {path.stem for path in (ROOT / "workers").iterdir()} & set(workers.__all__)
