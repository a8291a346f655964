"""Packages, torch and settings: what the doctor says of them, and what it reads."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from hubring.ps import cli
from hubring.ps.doctor import isolation, software, subject
from hubring.ps.doctor.finding import Finding
from tests.ps.doctor.case import Case, judgements, only

NEEDED = [Requirement("grpcio>=1.85"), Requirement("protobuf>=7")]
TORCH = Requirement("torch>=2.13")

CASES = [
    Case(
        software.judge_packages(NEEDED, {"grpcio": "1.85.1", "protobuf": "7.36.2"}, "hubring 1"),
        "ok",
        "hubring 1, grpcio 1.85.1, protobuf 7.36.2",
    ),
    Case(
        software.judge_packages(NEEDED, {"grpcio": "1.60.0", "protobuf": None}, "hubring 1"),
        "failure",
        "grpcio 1.60.0 is older than 1.85, protobuf is missing",
        "pip install 'grpcio>=1.85' 'protobuf>=7'",
    ),
    Case(
        software.judge_torch("2.13.0+cpu", "AVX512", True, TORCH),
        "ok",
        "2.13.0+cpu, computes with AVX512",
    ),
    Case(
        software.judge_torch("2.4.1", "AVX2", True, TORCH),
        "failure",
        "torch 2.4.1 is older than 2.13",
        "pip install 'torch>=2.13'",
    ),
    Case(
        software.judge_torch("2.13.0", "AVX2", False, TORCH),
        "failure",
        "computes a wrong product of two matrices of ones",
        "--force-reinstall torch",
    ),
    Case(software.judge_threads(2, 2.0), "ok", "2 on 2 core(s)"),
    Case(software.judge_threads(1, 0.5), "ok", "1 on 0.5 core(s)"),
    Case(
        software.judge_threads(16, 2.5),
        "warning",
        "16 threads on 2.5 core(s)",
        "export OMP_NUM_THREADS=2",
    ),
    Case(only(software.judge_settings({}, "", [])), "ok", "no PS_* variable is set"),
    Case(
        only(software.judge_settings({}, "", ["PS_MODE", "PS_PORT"])),
        "ok",
        "PS_MODE, PS_PORT: valid",
    ),
    Case(
        only(
            software.judge_settings(
                {"PS_WORKER": "no such setting; did you mean PS_WORKERS?"}, "", ["PS_WORKER"]
            )
        ),
        "failure",
        "did you mean PS_WORKERS?",
        "correct or remove PS_WORKER",
    ),
    Case(
        only(software.judge_settings({}, "--staleness 3 requires --mode ssp", ["PS_STALENESS"])),
        "warning",
        "--staleness 3 requires --mode ssp",
        "pass the flag, which overrides the environment",
    ),
]


@judgements(CASES)
def test_what_is_found_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


def test_requirements_leave_out_those_of_extras() -> None:
    lines = ["grpcio>=1.85", "torch>=2.13", "mpi4py>=4; extra == 'bench'"]
    assert software.requirements(lines) == [Requirement("grpcio>=1.85"), Requirement("torch>=2.13")]


@pytest.mark.parametrize(
    ("version", "least", "met"),
    [
        ("2.13.0+cpu", "2.13", True),
        ("2.9.1", "2.13", False),
        ("3", "2.13", True),
        ("2.14.0a0+git1", "2.13", True),
        ("2.13.0a0+git1", "2.13", True),
        ("2.13", "2.13.0", True),
        ("1.85.0", "1.85.1", False),
        ("unknown", "1", False),
        (None, "1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str | None, least: str, met: bool) -> None:
    assert software.meets(version, Requirement(f"torch>={least}")) == met


def test_our_own_package_names_what_it_needs() -> None:
    assert {"torch", "grpcio", "protobuf"} <= {each.name for each in software.needs()}


def test_a_torch_that_loads_slowly_leaves_its_checks_time_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = inspect.signature(cli.doctor).parameters["timeout"].default
    given: list[float] = []
    monkeypatch.setattr(software, "time", SimpleNamespace(monotonic=iter([100.0, 106.0]).__next__))

    def examine(checks: object, *times: float, whole: float) -> list[Finding]:
        given.extend(times)
        assert whole == seconds
        return []

    monkeypatch.setattr(isolation, "examine", examine)
    assert list(software.examine_torch([], seconds)) == []
    left, last = given
    assert left >= max(3.0, isolation.FAIR_SHARE * seconds)
    assert 6.0 + left + 2 * last <= seconds, "else it is killed before it can tell who hangs"


def examined(variables: dict[str, str], file: Path | None = None) -> list[Finding]:
    config = subject.settled({}, file, variables)
    return [*software.examine_settings(subject.Subject(config, file, None, variables, 1.0))]


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
    assert only(examined(variables)).state == "warning"


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
    assert subject.settled({}, file, {}).port == 5555
