"""Starts programs under test as forks of a process that has imported torch.

A new Python process needs more than two seconds of CPU time to import torch, and the same again for the
first optimizer. The tests start about two thousand programs. A fork is an ordinary process: it has its own
id, files and signals, and is a child of the process that requested it.

The fork server forks the tests' programs. Each program also has its own fork server, forked before the
program starts. Programs that it starts as `[ip netns exec NAME] python [-P] -m MODULE` are forks of that
server; other programs start normally.

A fork exits without unloading its modules, which would copy two hundred shared megabytes.
tests/system/test_topologies.py starts programs without forks, and tests their normal exit.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, Self

from hubring.ps.config.environment import become, silence_grpc, spare_forks
from hubring.ps.process.launch import end_after
from tests.support.processes.process_tree import take_in_orphans

_IMPORTED = ("torch._dynamo", "sklearn.datasets", "hubring.ps.server", "hubring.workers.run_script")
"""The first optimizer imports torch._dynamo; the job `digits` imports scikit-learn."""
_LONGEST = 1 << 17
"""Maximum bytes of a request, which is mostly the environment."""
_PR_SET_NAME = 15
_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_SPARE_DESCRIPTOR = 200
"""From here on, descriptors on their way; a program inherits lower numbers."""


class Forked:
    """A program that the fork server started; replaces a `subprocess.Popen`."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._command = command

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                ready, _, _ = select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
            if not ready:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts modules like `python -m MODULE ARGUMENTS`, but faster."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        out: BinaryIO,
        err: BinaryIO,
        network: str = "",
        mounts: str = "",
    ) -> Forked:
        """Starts a module with exactly these variables.

        Python and torch read some variables when they start, and so use the fork server's values. `network`
        is the name of a network namespace, as in `ip netns`. `mounts` is a shell command that runs in a mount
        namespace of the program's own.
        """
        told = {"module": module, "arguments": arguments, "environment": environment}
        files = [0, out.fileno(), err.fileno()]
        pid = _ask(self._socket, files, stand={"network": network, "mounts": mounts}, **told)
        return Forked(pid, [sys.executable, "-m", module, *arguments])

    def execute_child(self) -> Callable[..., None]:
        """Returns a `subprocess.Popen._execute_child` that starts Python as forks, in this process.

        Also scripts, and code after `-c`.
        """
        return _forking(self._socket, ["-m", "-c", ""])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._socket.close()
        self._process.wait()


def main() -> None:
    """Serves requests; each fork runs its module, and exits."""
    spare_forks()
    silence_grpc()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a garbage collection would copy the memory that forks share
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests handle Ctrl-C, and then close the connection
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    while asked is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            end_after(partial(_run, ours, **asked))
        ours.close()
        asked = _serve(theirs)
    os._exit(0)  # nothing to unload


def _ask(by: socket.socket, files: Sequence[int], **asked: Any) -> int:
    """Requests a process with these files, the standard ones first, from a fork server; returns its id."""
    socket.send_fds(by, [json.dumps({"folder": os.getcwd(), **asked}).encode()], files)
    pid = int.from_bytes(by.recv(8))
    if not pid:
        raise OSError(f"{asked['module']} could not be forked")
    return pid


def _serve(asking: socket.socket) -> dict[str, Any] | None:
    """Serves requests. Returns None in the server when the client has ended, and the request in a fork."""
    while True:
        request, files, _, _ = socket.recv_fds(asking, _LONGEST, _SPARE_DESCRIPTOR)
        if not request:
            return None
        ours, theirs = socket.socketpair()
        between = os.fork()
        if between == 0:
            # When its parent ends, the fork becomes a child of the nearest subreaper: the requesting process.
            if os.fork():
                os._exit(0)
            asking.close()
            ours.close()
            asked: dict[str, Any] = json.loads(request)
            theirs = _take([*range(3), *asked.pop("passed", ())], files, theirs)
            _stand(**asked.pop("stand"))
            theirs.send(os.getpid().to_bytes(8))
            theirs.recv(1)  # waits for that, since a shard ends if it has another parent
            theirs.close()
            return asked
        theirs.close()
        os.waitpid(between, 0)
        asking.send(ours.recv(8) or bytes(8))
        ours.close()
        for file in files:
            os.close(file)


def _take(targets: Sequence[int], files: Sequence[int], ours: socket.socket) -> socket.socket:
    """Gives the files these numbers, as a started program has them; returns our socket at a number apart."""
    spare = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _SPARE_DESCRIPTOR) for file in (*files, ours.fileno())]
    ours.close()
    for file in files:
        os.close(file)
    for target, file in zip(targets, spare, strict=False):
        os.dup2(file, target)
        os.close(file)
    return socket.socket(fileno=spare[-1])


def _stand(session: bool = False, group: int = -1, network: str = "", mounts: str = "") -> None:
    """Moves this process into a new session or process group, and into namespaces."""
    if session:
        os.setsid()
    elif group >= 0:
        os.setpgid(0, group)
    if network:
        with open(f"/run/netns/{network}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {network}")
    if mounts:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["sh", "-c", mounts], check=True)


def _run(
    fork_server: socket.socket,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    kind: str = "-m",
) -> None:
    """Sets this process up like a new Python process, and runs the module, the code or the script."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_in_orphans()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, module.encode() if kind == "-m" else b"python")
    become(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    os.chdir(folder)
    sys.argv = [kind if kind == "-c" else module, *arguments]
    if module != "hubring.workers.peers.fork_server":  # its forks are its own
        popen: Any = subprocess.Popen
        popen._execute_child = _forking(fork_server, ["-m"])
    if kind == "-m":
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(module, "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(module).absolute().parent)
        runpy.run_path(module, run_name="__main__")


def _program(command: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Returns how Python gets a program, the program and its arguments; empty for other commands.

    The program is a module after `-m`, code after `-c`, or a script.
    """
    if len(command) < 2 or command[0] != sys.executable:
        return []
    words = list(command[2:] if command[1] == "-P" else command[1:])
    found = words if words[0] in ("-m", "-c") else ["", *words]
    return found if found[0] in kinds and not found[1].startswith("-") else []


def _forking(fork_server: socket.socket, kinds: Sequence[str]) -> Callable[..., None]:
    """Makes `subprocess` start Python with a fork server, if it gets its program in one of these ways.

    `_execute_child` is private, but every start of a program calls it, in asyncio too, after the pipes are
    made. Waiting and signals remain `Popen`'s own.
    """
    popen: Any = subprocess.Popen
    afresh = popen._execute_child
    one_by_one = threading.Lock()

    def start(process: Any, args: Any, *how: Any) -> None:
        _, preexec, _, pass_fds, folder, environment, *_ = how
        pipes, (session, group) = how[9:15], how[-2:]
        variables = dict(os.environ if environment is None else environment)
        words = [] if isinstance(args, str | bytes) else [os.fsdecode(word) for word in args]
        network = words[3] if words[:3] == ["ip", "netns", "exec"] else ""
        program = _program(words[4:] if network else words, kinds)
        if not program or preexec or (folder and kinds == ["-m"]) or "PYTHONSAFEPATH" in variables:
            return afresh(process, args, *how)
        stdin, _, _, stdout, _, stderr = pipes
        files = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
        told = {
            "kind": program[0],
            "module": program[1],
            "arguments": program[2:],
            "environment": variables,
            "stand": {"session": session, "group": group, "network": network},
            "passed": list(pass_fds),
            "folder": os.fspath(folder or os.getcwd()),
        }
        with one_by_one:
            process.pid = _ask(fork_server, [*files, *pass_fds], **told)
        process._child_created = True
        process._close_pipe_fds(*pipes)
        return None

    return start


if __name__ == "__main__":
    main()
