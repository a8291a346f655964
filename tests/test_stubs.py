from __future__ import annotations

from pathlib import Path

import pytest

from protos import generate


def test_stubs_are_those_of_the_protos() -> None:
    generate.main(["--check"])


def test_stale_stub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in generate.stubs(generate.HERE).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "data_pb2.py").write_text("# older")
    fresh = generate.stubs(generate.HERE)
    monkeypatch.setattr(generate, "generate", lambda out: write(out / "protos", fresh))
    monkeypatch.setattr(generate, "HERE", tmp_path)
    with pytest.raises(SystemExit, match=r"stale stubs: data_pb2\.py; run python -m protos\.generate"):
        generate.main(["--check"])


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
