"""Makes the stubs beside this file from its `.proto` files: `python -m hubring.protos.generate [--check]`.

With `--check` it writes nothing, and fails if the stubs that are checked in differ.
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
    """Writes every stub and its `.pyi` under `out/hubring/protos/`."""
    from grpc_tools import protoc

    scripts = Path(sysconfig.get_path("scripts"))  # of this interpreter, whatever PATH says
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
        raise SystemExit("protoc failed; its words are above")


def stubs(folder: Path) -> dict[str, str]:
    """File name to text, for every stub in `folder`."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*_pb2*.py*"))}


def main(arguments: list[str]) -> None:
    """Regenerates in place, or compares."""
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
