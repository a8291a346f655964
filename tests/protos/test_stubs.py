from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hubring.protos import generate
from hubring.ps.core.types import PROTOCOL

ROOT = Path(__file__).parents[2]


def test_stubs_are_those_of_the_protos() -> None:
    generate.main(["--check"])


def test_stale_stub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in generate.stubs(generate.HERE).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "data_pb2.py").write_text("# older")
    fresh = generate.stubs(generate.HERE)
    monkeypatch.setattr(generate, "generate", lambda out: write(out / "hubring" / "protos", fresh))
    monkeypatch.setattr(generate, "HERE", tmp_path)
    with pytest.raises(SystemExit, match=r"data_pb2\.py; run python -m hubring\.protos\.generate"):
        generate.main(["--check"])


SPOKEN = {18: "8d94cdf182a2536a"}
"""The protocol's number, and a digest of what is spoken under it."""


def test_a_change_of_the_protos_needs_a_decision_on_the_protocol_number() -> None:
    """If they could, raise PROTOCOL; either way give the new digest here."""
    bare = [re.sub(r"//.*", "", (generate.HERE / name).read_text()) for name in generate.PROTOS]
    words = " ".join(word for text in bare for word in text.split())
    assert {PROTOCOL: hashlib.sha256(words.encode()).hexdigest()[:16]} == SPOKEN


def test_pyproject_requires_the_versions_that_the_stubs_accept() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    stub = (generate.HERE / "control_pb2.py").read_text()
    service = (generate.HERE / "control_pb2_grpc.py").read_text()
    (protobuf,) = re.findall(r"# Protobuf Python Version: (\S+)", stub)
    (grpc,) = re.findall(r"GRPC_GENERATED_VERSION = '(\S+)'", service)
    assert needed["protobuf"] == SpecifierSet(f">={protobuf},<{int(protobuf.partition('.')[0]) + 1}")
    assert needed["grpcio"] == SpecifierSet(f">={grpc}")


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
