"""The command line of `ps-run` beside settings: hosts, flags that have no effect, and a script.

Hosts are written as for `horovodrun`, and must be this machine. `horovodrun`'s other flags are accepted,
so that scripts run without edits, and `ps-run` prints why they have no effect. The rest is a script or a
module, with or without `python` and its options.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from itertools import chain, groupby
from pathlib import Path

import typer

from hubring.ps.config.terminal import parameter
from hubring.ps.core.errors import UsageError
from hubring.ps.process.launch import module_exists

ELSEWHERE = (
    "ps-run starts workers only on this machine; for several machines, start ps-server on one of them, and"
    " ps-worker with the cluster's launcher: srun, torchrun, mpirun, or Kubernetes"
)


def host_slots(
    hosts: str | None, hostfile: Path | str | None, script: str | None, default: int = 1
) -> int | None:
    """Returns the number of worker slots; None without hosts.

    Args:
        hosts: A list such as `localhost:4`, separated by commas.
        hostfile: A file with lines such as `localhost slots=4`.
        script: A program that prints lines such as `localhost:4`; it runs once.
        default: Slots of a host without a number.

    Raises:
        UsageError: Two options name hosts, a host is another machine, or a host is malformed.
    """
    ways = {"--hosts": hosts, "--hostfile": hostfile, "--host-discovery-script": script}
    given = [way for way, value in ways.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both set the hosts; remove all but one")
    if hosts:
        return _total(hosts.split(","), default)
    if hostfile:
        return _total(_lines_of(Path(hostfile)), default)
    return _total(_output_of(script), default) if script else None


def _lines_of(hostfile: Path) -> list[str]:
    if not hostfile.is_file():
        raise UsageError(f"--hostfile {hostfile}: the file does not exist")
    lines = [line.partition("#")[0].strip() for line in hostfile.read_text().splitlines()]
    return [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]


def _output_of(script: str) -> list[str]:
    flag = f"--host-discovery-script {script}"
    try:
        # A command for the shell, as in Horovod: it can have arguments, and a script needs no first line #!.
        command = ["/bin/sh", "-c", script]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"{flag}: /bin/sh cannot be run: {error.strerror}") from error
    if done.returncode:
        raise UsageError(f"{flag}: the script exited with {done.returncode}: {done.stderr.strip()}")
    return [line for line in done.stdout.splitlines() if line.strip()]


def _total(hosts: list[str], default: int) -> int:
    return sum(_slots(one, default) for one in hosts)


def _slots(text: str, default: int) -> int:
    match = re.fullmatch(r"(?P<host>[^\s:]+)(:(?P<slots>[1-9][0-9]*))?", text.strip())
    if match is None:
        raise UsageError(f"host {text!r}: expected HOST:SLOTS, as in localhost:4")
    if match["host"] not in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        raise UsageError(f"host {match['host']!r} is another machine; {ELSEWHERE}")
    return int(match["slots"] or default)


_WHY = {
    "workers meet at the server, a ring always runs on Gloo or NCCL, and there is no MPI": (
        *("gloo", "mpi", "mpi_args=", "mpi_threads_disable", "tcp", "binding_args=", "gloo_timeout_seconds="),
    ),
    "operations start immediately, not in cycles": ("cycle_time_ms=", "timeline_mark_cycles"),
    "there is no response cache": ("disable_cache", "cache_capacity="),
    "ps-run uses only this machine": (
        *("network_interfaces=", "network_interface=", "ssh_port=", "ssh_identity_file="),
        *("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
        "blacklist_cooldown_range==",
    ),
    "the exchange tunes itself": ("autotune", "num_nccl_streams=", "thread_affinity="),
    "waiting workers always log who is missing": (
        *("stall_check", "stall_check_warning_time_seconds=", "stall_check_shutdown_time_seconds="),
    ),
    "--start-timeout applies instead": ("elastic_timeout=",),
    "PS_LOG_FORMAT sets the log format, and --verbose shows the server's log": (
        *("log_level=", "log_with_timestamp", "prefix_output_with_timestamp"),
    ),
}
"""Reason to flags. Each trailing `=` is one value that the flag takes."""
_TAKES = (bool, str, tuple[int, int])
_SHORT = {"ssh_port": "-p", "ssh_identity_file": "-i"}
IGNORED_FLAGS = {name.rstrip("="): why for why, names in _WHY.items() for name in names}
"""Name of a flag's parameter to the reason."""


def ignored_options() -> Iterator[Parameter]:
    """Yields a hidden option of `ps-run` for each of these flags; the default is None."""
    for spelt in chain(*_WHY.values()):
        name = spelt.rstrip("=")
        decls = (_SHORT[name], f"--{name.replace('_', '-')}") if name in _SHORT else ()
        yield parameter(name, _TAKES[spelt.count("=")], typer.Option(*decls, hidden=True))


def ignored_notices(given: Iterable[str]) -> Iterator[str]:
    """Yields one line for each reason, which names the given flags."""
    names = set(given)
    for why, idle in groupby(IGNORED_FLAGS, IGNORED_FLAGS.__getitem__):
        flags = [f"--{name.replace('_', '-')}" for name in idle if name in names]
        if flags:
            yield f"{', '.join(flags)}: no effect, since {why}"


EXAMPLES = "for example: ps-run -np 2 train.py [ARGS]..., or ps-run -np 2 python -m package.train [ARGS]..."
_PYTHON_FLAGS = frozenset("bBdEIOPqsSuv")
_PYTHON_FLAGS_WITH_VALUE = frozenset("WX")


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """What each worker runs.

    Attributes:
        words: The script or the module, and its arguments.
        is_module: Whether the first word is a module.
        options: Options of the Python interpreter.
    """

    words: list[str]
    is_module: bool = False
    options: tuple[str, ...] = ()

    @property
    def safe_path(self) -> bool:
        """Whether Python must not search the script's folder: the options `-P` and `-I`."""
        return any(re.match("-[bBdEOqsSuv]*[PI]", option) for option in self.options)


def parse_command(command: list[str], *, is_module: bool = False) -> ScriptCommand:
    """Parses the command.

    Args:
        command: The words after `ps-run`'s flags.
        is_module: Whether `ps-run` itself got `-m`.

    Raises:
        UsageError: The command names no script or module, or one that does not exist.
    """
    parsed = _of_python(command) if _names_python(command) else ScriptCommand(command, is_module)
    # Checked here, since each worker would raise the same later.
    kind = "module" if parsed.is_module else "script"
    if not parsed.words or parsed.words[0].startswith("-"):
        found = f"{parsed.words[0]!r} is not a {kind}" if parsed.words else "the command line names none"
        raise UsageError(f"a {kind} is missing: {found}; {EXAMPLES}")
    name = parsed.words[0]
    if not parsed.is_module and not Path(name).is_file():
        raise UsageError(f"script {name} does not exist; {EXAMPLES}")
    if parsed.is_module and not module_exists(name):
        raise UsageError(f"module {name} does not exist in this folder or in {sys.prefix}; {EXAMPLES}")
    return parsed


def _names_python(command: list[str]) -> bool:
    return bool(command) and re.fullmatch(r"python(3(\.\d+)?)?", Path(command[0]).name) is not None


def other_python(command: list[str]) -> str:
    """Returns the interpreter that the command names, if it is of another environment; otherwise empty."""
    found = shutil.which(command[0]) if _names_python(command) else None
    return found if found and Path(found).parent != Path(sys.executable).parent else ""


def _of_python(command: list[str]) -> ScriptCommand:
    """Parses `python [OPTIONS] (SCRIPT | -m MODULE) [ARGS]`."""
    options: list[str] = []
    left = command[1:]
    while left and left[0].startswith("-") and left[0] != "-":
        word, *left = left
        letters = word[1:].lstrip("".join(_PYTHON_FLAGS))
        if not letters:
            options.append(word)
        elif letters[0] in _PYTHON_FLAGS_WITH_VALUE:
            options += [word] if letters[1:] else [word, *left[:1]]
            left = left if letters[1:] else left[1:]
        elif letters[0] == "m":
            flags, name = word.removesuffix(letters), letters[1:]
            options += [flags] if flags != "-" else []
            return ScriptCommand([name, *left] if name else left, True, tuple(options))
        else:
            raise UsageError(f"python {word}: ps-run starts a script or a module only; {EXAMPLES}")
    return ScriptCommand(left, options=tuple(options))
