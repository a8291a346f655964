"""Child processes, several that end together, and other processes of this host."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Generic, NamedTuple, Protocol, Self, TypeVar


class Process(NamedTuple):
    """A process, as another process of this host can name it.

    Attributes:
        pid: Its process id.
        started: When it started, in clock ticks since the host's start: its number may be used again.
    """

    pid: int
    started: int

    @property
    def age(self) -> float:
        """Seconds since it started; very many if that is unknown."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / os.sysconf("SC_CLK_TCK")


def process(pid: int) -> Process:
    """Returns the process with this id; it has ended if there is none."""
    return Process(pid, _started(pid))


class Adopted:
    """A process whose parent has ended, watched and ended like a child.

    Args:
        name: Its display name.
        process: The process. It may have ended.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name, self.pid, self.process = name, process.pid, process
        self._descriptor = _open(process)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def ended(self) -> str:
        """A clause if it has ended; empty while it runs. Only its parent learns its exit code."""
        return "" if self._descriptor is not None and not self.wait(0.0) else "has ended"

    def wait(self, seconds: float) -> bool:
        """Returns whether it ends within `seconds`."""
        if self._descriptor is None:
            return True
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(1e3 * seconds))

    def ask_to_stop(self) -> None:
        """Asks it to stop."""
        self.signal(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        """Waits `seconds` for its end, then kills it."""
        if not self.wait(seconds):
            self.signal(signal.SIGKILL)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def signal(self, number: int) -> None:
        """Sends a signal. Does nothing once the process has ended."""
        if self._descriptor is not None and not self.wait(0.0):
            signal.pidfd_send_signal(self._descriptor, number)


def _open(process: Process) -> int | None:
    """Returns a descriptor of the process, or None if it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.started and _started(process.pid) == process.started:  # compared once the number is held
        return descriptor
    os.close(descriptor)
    return None


def _started(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[19])  # the field `starttime`


log = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""Seconds that a child has to stop by itself. A busy machine needs that long."""


def ending(code: int) -> str:
    """Describes how a process with this return code ended, as a clause."""
    if code >= 0:
        return f"exited with {code}"
    names = [f" ({each.name})" for each in signal.Signals if each == -code]  # real-time signals have none
    return f"was killed by signal {-code}{''.join(names)}"


class Child:
    """A child process in its own process group, so that a Ctrl-C in the terminal reaches only the parent.

    Args:
        name: Its display name.
        command: Program and arguments.
        environment: All of its environment variables; None for the parent's.
        session: Whether the child also leads a session, so that closing the terminal does not end it.
        stdin: With a pipe, an empty line or the end of input asks the child to stop. Otherwise SIGTERM does.
        more: `stdout`, `stderr` and `pass_fds` of `subprocess.Popen`.

    Attributes:
        process: The child as other processes can name it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        session: bool = False,
        stdin: int | None = subprocess.DEVNULL,
        **more: Any,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        group: dict[str, Any] = {"start_new_session": True} if session else {"process_group": 0}
        self._process = subprocess.Popen[bytes](command, env=environment, stdin=stdin, **group, **more)
        self.process = process(self.pid)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def pid(self) -> int:
        """The process id, which is also the process group's id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while the child runs."""
        return self._process.poll()

    @property
    def ended(self) -> str:
        """How the child ended, as a clause; empty while it runs."""
        return "" if self.code is None else ending(self.code)

    @property
    def stdout(self) -> IO[bytes]:
        """The parent's end of the standard output pipe. `stdin` and `stderr` likewise."""
        return _pipe(self._process.stdout)

    @property
    def stdin(self) -> IO[bytes]:
        return _pipe(self._process.stdin)

    @property
    def stderr(self) -> IO[bytes]:
        return _pipe(self._process.stderr)

    def signal(self, number: int) -> None:
        """Sends a signal. Does nothing once the child has ended."""
        self._process.send_signal(number)

    def tell(self, line: str) -> None:
        """Writes a line to the child's standard input."""
        self.stdin.write(f"{line}\n".encode())
        self.stdin.flush()

    def ask_to_stop(self) -> None:
        """Asks the child to stop."""
        if self._process.stdin is None:
            self.signal(signal.SIGTERM)
        elif not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # the child has ended already
                # Closing the pipe is not enough: another child of ours may hold a copy.
                self.stdin.write(b"\n")
                self.stdin.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Returns whether the child ends within `seconds`; None for no limit."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_code(self) -> int:
        """Waits for the child and returns its exit code, or 128+n after signal n, like a shell."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def end(self, seconds: float) -> None:
        """Waits `seconds` for the child, then kills its process group."""
        if not self.wait(seconds):
            log.warning("%s did not stop in time; killing it", self)
            self.kill()

    def kill(self) -> None:
        """Kills the child's process group at once, also what a child that has ended left in it."""
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def stop(self, seconds: float = GRACE_SECONDS) -> None:
        """Asks the child to stop, then ends it."""
        self.ask_to_stop()
        self.end(seconds)


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


class Endable(Protocol):
    """A process that can be ended like a `Child`."""

    def ask_to_stop(self) -> None: ...

    def end(self, seconds: float) -> None: ...


E = TypeVar("E", bound=Endable)
C = TypeVar("C", bound=Child)


class Children(Generic[E]):
    """Several children. Leaving the `with` block ends them all.

    Args:
        grace: Seconds that all of them together have to stop by themselves.

    Attributes:
        started: The children in the order in which they were added.
    """

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self.started: list[E] = []
        self._grace = grace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, child: E) -> E:
        """Adds a child and returns it."""
        self.started.append(child)
        return child

    def signal(self: Children[C], number: int) -> None:
        """Sends a signal to all children."""
        for child in list(self.started):
            child.signal(number)

    def end(self) -> None:
        """Asks all children to stop, then kills the ones that are too slow."""
        for child in self.started:
            child.ask_to_stop()
        deadline = time.monotonic() + self._grace
        for child in self.started:
            self._end_one(child, max(0.0, deadline - time.monotonic()))

    def _end_one(self, child: E, seconds: float) -> None:
        child.end(seconds)


def first_ended(children: Sequence[C], seconds: float | None = None) -> C | None:
    """Returns a child that has ended.

    Waits at most `seconds` for one (None for no limit). Returns None if no child ended.
    """
    with ExitStack() as stack:
        poller = select.poll()
        for child in children:
            if child.code is not None:
                return child
            try:
                descriptor = os.pidfd_open(child.pid)
            except ProcessLookupError:  # it ended just now, and a signal handler reaped it
                return child
            stack.callback(os.close, descriptor)
            poller.register(descriptor)
        poller.poll(None if seconds is None else 1e3 * seconds)
    return next((child for child in children if child.code is not None), None)


@contextmanager
def passing_on(numbers: Sequence[signal.Signals], send: Callable[[int], None]) -> Iterator[None]:
    """Passes these signals to `send` while the block runs. They have no other effect."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        send(number)

    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
