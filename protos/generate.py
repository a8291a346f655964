"""Generates the stubs from the `.proto` files: `python -m hubring.protos.generate [--check]`.

`--check` writes nothing and fails if the stubs on disk differ.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).parent
PROTOS = ("control.proto", "data.proto")


def generate(out: Path) -> None:
    """Writes every stub and its `.pyi` to `out/hubring/protos/`."""
    from grpc_tools import protoc

    scripts = Path(sysconfig.get_path("scripts"))  # this interpreter's, not the ones on PATH
    arguments = [
        "protoc",
        f"-I{HERE.parents[1]}",
        f"-I{files('grpc_tools') / '_proto'}",
        *(f"--plugin={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *(f"hubring/protos/{name}" for name in PROTOS),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; see its output above")


def stubs(folder: Path) -> dict[str, str]:
    """Returns the text of every stub in `folder`, by file name."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*_pb2*.py*"))}


def main(arguments: list[str]) -> None:
    """Generates the stubs, or compares them with the ones on disk."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = stubs(Path(scratch) / "hubring" / "protos")
    if arguments == ["--check"]:
        stale = sorted(name for name, text in fresh.items() if stubs(HERE).get(name) != text)
        if stale:
            raise SystemExit(f"stale stubs: {', '.join(stale)}; run python -m hubring.protos.generate")
        return
    for name, text in fresh.items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
