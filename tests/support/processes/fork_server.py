"""Starts programs under test as forks of one process that has imported torch already.

A fresh Python takes more than two seconds of processor time until it has torch, and as long again
for its first optimizer; the tests start some two thousand. A fork is a process like any other: it
has its own id, files, signals and end, and is the child of whoever asked for it.

The fork server forks the tests' programs. Each program has a fork server of its own, forked from before it
began: what the program starts as `python [-P] -m MODULE` is forked from that, and all else is started as
ever.

A fork ends without taking its modules down: that would copy two hundred megabytes which it shares with
all others. tests/system/test_topologies.py starts programs afresh, and sees them end to the last.
"""

from __future__ import annotations

import atexit
import ctypes
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
from types import TracebackType
from typing import Any, BinaryIO, NoReturn, Self

from hubring.ps.config.environment import become, spare_forks
from tests.support.processes.orphans import take_in_orphans

_IMPORTED = ("torch._dynamo", "sklearn.datasets", "hubring.ps.server", "hubring.workers.run_script")
"""torch._dynamo comes with the first optimizer; scikit-learn holds the digits."""
_LONGEST = 1 << 17
"""Bytes of one request, which is mostly the environment."""
_PR_SET_NAME = 15
_CLONE_NEWNET = 0x40000000


class Forked:
    """A program that the fork server started; stands for a `subprocess.Popen`."""

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
    """Starts modules as `python -m MODULE ARGUMENTS` would, only sooner."""

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
    ) -> Forked:
        """The variables are given whole; what Python or torch read as they start is the fork server's own.

        `network` is the name of its network namespace, as `ip netns` knows it.
        """
        told = {"module": module, "arguments": arguments, "environment": environment}
        files = [0, out.fileno(), err.fileno()]
        pid = _ask(self._socket, files, stand={"network": network}, **told)
        return Forked(pid, [sys.executable, "-m", module, *arguments])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._socket.close()
        self._process.wait()


def main() -> None:
    """Forks whatever is asked for; each fork runs its module, and ends."""
    spare_forks()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what forks share is not to be copied by looking at it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this by hanging up
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    while asked is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            _end(_code_of(_run, ours, **asked))
        ours.close()
        asked = _serve(theirs)
    os._exit(0)  # there is nothing to take down


def _code_of(run: Callable[..., None], *arguments: Any, **more: Any) -> int:
    """Runs a program; returns its exit code. What Python must print as it ends is raised."""
    try:
        run(*arguments, **more)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        return end.code or 0
    return 0


def _end(code: int) -> NoReturn:
    """Ends as Python does, in the same order, up to where it would take down its modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ask(by: socket.socket, files: Sequence[int], **asked: Any) -> int:
    """Asks a fork server for a process with these standard files; returns its id."""
    socket.send_fds(by, [json.dumps({"folder": os.getcwd(), **asked}).encode()], files)
    pid = int.from_bytes(by.recv(8))
    if not pid:
        raise OSError(f"{asked['module']} could not be forked")
    return pid


def _serve(asking: socket.socket) -> dict[str, Any] | None:
    """Returns None when whoever asks has ended; in a fork, what it is to do."""
    while True:
        request, files, _, _ = socket.recv_fds(asking, _LONGEST, 3)
        if not request:
            return None
        ours, theirs = socket.socketpair()
        between = os.fork()
        if between == 0:
            # The child of one that has ended falls to the nearest above that takes in orphans: who asked.
            if os.fork():
                os._exit(0)
            asking.close()
            ours.close()
            for target, file in enumerate(files):
                os.dup2(file, target)
            for file in files:
                os.close(file)
            asked: dict[str, Any] = json.loads(request)
            _stand(**asked.pop("stand"))
            theirs.send(os.getpid().to_bytes(8))
            theirs.recv(1)  # until it is adopted: a shard ends where its parent is not who started it
            theirs.close()
            return asked
        theirs.close()
        os.waitpid(between, 0)
        asking.send(ours.recv(8) or bytes(8))
        ours.close()
        for file in files:
            os.close(file)


def _stand(session: bool = False, group: int = -1, network: str = "") -> None:
    """Puts this process into a session or process group of its own, and into a network namespace."""
    if session:
        os.setsid()
    elif group >= 0:
        os.setpgid(0, group)
    if network:
        with open(f"/run/netns/{network}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {network}")


def _run(
    fork_server: socket.socket, module: str, arguments: list[str], environment: dict[str, str], folder: str
) -> None:
    """Makes this process what a fresh one would be, but for its children, and runs the module."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_in_orphans()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, module.encode())
    become(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    os.chdir(folder)
    sys.argv = [module, *arguments]
    _fork_modules(fork_server)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _module(command: list[str]) -> list[str]:
    """The module that a command runs, and its arguments; empty if it runs something else."""
    for python in ([sys.executable, "-P", "-m"], [sys.executable, "-m"]):
        if command[: len(python)] == python:
            return command[len(python) :]
    return []


def _fork_modules(fork_server: socket.socket) -> None:
    """From here on, `subprocess` has this process's fork server fork what runs a module of Python's.

    `_execute_child` is nobody's interface, but whatever starts a program comes through it, asyncio too, with
    its pipes made; and what follows, waiting and signals, is `Popen`'s own as ever.
    """
    popen: Any = subprocess.Popen
    afresh = popen._execute_child
    one_by_one = threading.Lock()

    def start(process: Any, args: Any, *how: Any) -> None:
        _, preexec, _, pass_fds, folder, environment, *_ = how
        pipes, (session, group) = how[9:15], how[-2:]
        module = _module(list(args))
        if not module or preexec or pass_fds or folder:
            return afresh(process, args, *how)
        stdin, _, _, stdout, _, stderr = pipes
        files = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
        told = {
            "module": module[0],
            "arguments": module[1:],
            "environment": dict(os.environ if environment is None else environment),
            "stand": {"session": session, "group": group},
        }
        with one_by_one:
            process.pid = _ask(fork_server, files, **told)
        process._child_created = True
        process._close_pipe_fds(*pipes)
        return None

    popen._execute_child = start


if __name__ == "__main__":
    main()
