"""Packages, torch and settings: what the doctor says of them, and what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor import software
from hubring.ps.doctor.check import Finding, Subject, settled
from tests.ps.doctor.case import Case, fails, fine, judgements, only, warns

NEEDED = [Requirement("grpcio>=1.85"), Requirement("protobuf>=7")]
TORCH = Requirement("torch>=2.13")


def packages(grpcio: str, protobuf: str | None) -> Finding:
    return software.judge_packages(NEEDED, {"grpcio": grpcio, "protobuf": protobuf}, "hubring 1")


CASES = [
    fails(packages("1.60.0", None), "grpcio 1.60.0 is older than 1.85, protobuf is missing", "'protobuf>=7'"),
    fails(software.judge_torch("2.4.1", "AVX2", True, TORCH), "2.4.1 is older than 2.13", "'torch>=2.13'"),
    fails(
        software.judge_torch("2.13.0", "AVX2", False, TORCH), "a wrong product of two", "--force-reinstall"
    ),
    warns(software.judge_torch("9.0", "AVX2", True, TORCH), "9.0 is newer than torch 2", "'torch==2."),
    fine(software.judge_threads(1, 0.5), "1 on 0.5 core(s)"),
    warns(software.judge_threads(16, 2.5), "16 threads on 2.5 core(s)", "export OMP_NUM_THREADS=2"),
    fine(only(software.judge_settings({}, "", [])), "no PS_* variable is set"),
    fine(only(software.judge_settings({}, "", ["PS_MODE", "PS_PORT"])), "PS_MODE, PS_PORT: valid"),
]


@judgements(CASES)
def test_each_finding_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


def test_requirements_leave_out_those_of_extras() -> None:
    lines = ["grpcio>=1.85", "torch>=2.13", "mpi4py>=4; extra == 'bench'"]
    assert software.requirements(lines) == [Requirement("grpcio>=1.85"), Requirement("torch>=2.13")]


@pytest.mark.parametrize(
    ("version", "least", "met"),
    [
        ("2.13.0+cpu", "2.13", True),
        ("2.9.1", "2.13", False),
        ("2.13.0a0+git1", "2.13", True),
        ("2.13", "2.13.0", True),
        ("1.85.0", "1.85.1", False),
        ("unknown", "1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str | None, least: str, met: bool) -> None:
    assert software.meets(version, Requirement(f"torch>={least}")) == met


def test_our_own_package_names_what_it_needs() -> None:
    assert {"torch", "grpcio", "protobuf"} <= {each.name for each in software.needs()}


def examined(variables: dict[str, str], file: Path | None = None) -> list[Finding]:
    config = settled({}, file, variables)
    return [*software.examine_settings(Subject(config, file, None, variables, 1.0))]


def test_each_variable_is_judged_by_itself() -> None:
    wrong = examined({"PS_WORKER": "2", "PS_PORT": "ten", "PS_SERVER": "", "PS_MODE": "asp", "HOME": "/"})
    assert [finding.state for finding in wrong] == ["failure"] * 3
    for finding, name, words in zip(
        wrong,
        ("PS_WORKER", "PS_PORT", "PS_SERVER"),
        ("did you mean PS_WORKERS?", "a port from", "is empty"),
        strict=True,
    ):
        assert words in finding.found
        assert finding.fix == f"correct or remove {name}"


@pytest.mark.parametrize("variables", [{"PS_STALENESS": "3"}, {"PS_BACKEND": "nccl"}])
def test_settings_that_contradict_each_other_are_a_warning_as_flags_may_fix_it(
    variables: dict[str, str],
) -> None:
    told = only(examined(variables))
    assert told.state == "warning"
    assert "pass the flag, which overrides the environment" in told.fix


@pytest.mark.parametrize(
    "variables", [{}, {"PS_TOPOLOGY": "ring"}, {"PS_SERVER": "hub1:5555", "PS_WORLD_SIZE": "4"}]
)
def test_a_worker_is_taken_to_have_a_server(variables: dict[str, str]) -> None:
    assert only(examined(variables)).state == "ok"


def test_a_file_that_is_wrong_is_told_and_the_rest_is_looked_at_with_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[server]\nprot = 7000\n")
    told = only(examined({}, file))
    assert told.state == "failure"
    assert "did you mean port?" in told.found
    assert settled({}, file, {}).port == 5555


def test_settings_are_those_that_a_server_would_find(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[server]\nport = 7000\n")
    config = settled({"checkpoint_dir": tmp_path}, file, {"PS_PAGE_PORT": "8000"})
    assert (config.port, config.page_port, config.checkpoint_dir) == (7000, 8000, tmp_path)
    with pytest.raises(ConfigError, match="--port 70000"):
        settled({"port": 70000}, None, {})


def test_the_ring_of_a_server_here_meets_here() -> None:
    here = Subject(ServerConfig(), None, None, {}, 20.0)
    assert here.ring_address == "127.0.0.1"
    assert here._replace(server="localhost:5555").ring_address == "localhost"
    with pytest.raises(ConfigError, match="no route from this machine to"):
        _ = here._replace(server="255.255.255.255:5555").ring_address
