"""All checks, and how they run: in two processes, one with torch, where a crash or a hang is a finding.

A broken machine can break the process that examines it: a library exits, crashes or hangs. Without torch,
the checks run side by side, on threads. With torch, they run one after another, so that it is known which
one crashed; a GPU's driver can also stop all threads of its process. `python -m hubring.ps.doctor.checks`
is such a process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread, get_native_id
from typing import BinaryIO

import msgspec

from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor import machine, network, software
from hubring.ps.doctor.check import DoctorCheck, Finding, Subject, failure, skipped, warning
from hubring.ps.process.child import ending
from hubring.ps.process.launch import end_with_parent, module_command

MODULE = "hubring.ps.doctor.checks"
LAST_SECONDS = 5.0
"""How long to wait for a killed process. One that hangs in the kernel is abandoned."""
WORKING_SHARE = 0.5
"""A process that was at work for more than this share of its time is slow; one that was not hangs."""

_RESOLVER = "remove name servers that do not answer from /etc/resolv.conf, or add the name to /etc/hosts"
_TORCH = "pip install --force-reinstall torch; python -c 'import torch' shows the error"
_DRIVER = (
    "run nvidia-smi; if it fails too, the driver is broken: restart the machine, or train on the CPU with"
    f" {software.VISIBLE}="
)
_GLOO = "check ip addr and iptables -L; until it is fixed, do not use --topology ring"
_TLS = "check --tls-cert, --tls-key, --tls-ca"
_PACKAGES = "install Hubring again: pip install --force-reinstall . in its clone"
_VARIABLES = "list the variables with env | grep ^PS_, and unset the wrong ones"
_DISK = "the disk or file server does not answer: check mount and dmesg, or use another --checkpoint-dir"


def torch_checks(subject: Subject) -> list[DoctorCheck]:
    """Returns the checks that need torch, in the order in which they run.

    Gloo's comes before CUDA's: a ring on CPUs works although the driver hangs.
    """
    return [
        DoctorCheck(software.TORCH, software.examine_torch, _TORCH),
        DoctorCheck(software.GLOO, partial(software.examine_gloo, subject), _GLOO),
        DoctorCheck(software.CUDA, partial(software.examine_cuda, subject.variables), _DRIVER),
        DoctorCheck(software.NCCL, software.examine_nccl, software.NCCL_FIX),
    ]


def other_checks(subject: Subject) -> list[DoctorCheck]:
    """Returns the checks of this machine, and of the server if there is one, in display order."""
    config, shm, here = subject.config, machine.SHM, network.outside()
    checks = [
        DoctorCheck(software.PACKAGES, software.examine_packages, _PACKAGES),
        DoctorCheck(software.SETTINGS, partial(software.examine_settings, subject), _VARIABLES),
        DoctorCheck(machine.MEMORY, machine.examine_memory, "check free -m and cat /proc/self/cgroup"),
        DoctorCheck(machine.SHARED, machine.examine_shared, f"check ls -ld {shm} and mount", (shm,)),
        DoctorCheck(machine.DISK, partial(machine.examine_disk, config.checkpoint_dir), _DISK),
        DoctorCheck(machine.CLOCK, machine.examine_clock, "check timedatectl"),
        DoctorCheck(network.OWN_NAME, partial(network.examine_own_name, here), _RESOLVER),
        DoctorCheck(network.INTERFACES, partial(network.examine_interfaces, subject, here), _RESOLVER),
        DoctorCheck(network.CERTIFICATE, partial(network.examine_certificate, subject), _TLS),
        DoctorCheck(network.CONTROL_PORT, partial(network.examine_ports, config), "check ss -ltnp"),
    ]
    if subject.server is not None:
        ask = partial(network.examine_server, subject.server, config, subject.seconds)
        fix = f"run ps-server status {subject.server}; {_RESOLVER}"
        checks.append(DoctorCheck(network.SERVER, ask, fix, (network.VERSIONS, network.CLOCKS)))
    return checks


CHECKS = {"torch": torch_checks, "machine": other_checks}
"""What each process runs."""


def examine(subject: Subject) -> list[Finding]:
    """Runs all checks and returns their findings in display order.

    Raises:
        ConfigError: This process cannot start another process.
    """
    runs: list[CheckProcess] = []
    with ThreadPoolExecutor(len(CHECKS)) as threads:
        try:
            for name, checks in CHECKS.items():  # in this thread: a process ends with the thread that made it
                runs.append(CheckProcess(name, checks(subject), subject))
            of_torch, others = threads.map(CheckProcess.findings, runs)
        finally:
            for run in runs:
                run.process.kill()
    found = of_torch | others
    first = (software.PACKAGES, software.TORCH, software.CUDA, software.NCCL, software.GLOO)
    return [finding for name in dict.fromkeys([*first, *found]) for finding in found[name]]


class CheckProcess:
    """A process that runs some of the checks.

    Args:
        name: The key in CHECKS.
        checks: The checks.
        subject: What they examine, and their time limit.

    Raises:
        ConfigError: The process cannot be started.
    """

    def __init__(self, name: str, checks: Sequence[DoctorCheck], subject: Subject) -> None:
        self._checks = checks
        self._in_turn = name == "torch"
        self._subject = subject
        self._deadline = time.monotonic() + subject.seconds
        command, pipe = module_command(MODULE, name, str(os.getpid())), subprocess.PIPE
        try:
            with TemporaryFile() as asked:  # a pipe would stay open if the time is over before it is read
                pickle.dump(subject, asked)
                asked.seek(0)
                self.process = subprocess.Popen(command, stdin=asked, stdout=pipe, stderr=pipe)
        except OSError as error:
            why = f"cannot start a process for the checks: {error.strerror}; raise ulimit -n and ulimit -u"
            raise ConfigError(why) from error

    def findings(self) -> dict[str, list[Finding]]:
        """Returns the findings of each check, once all have ended or their time is over."""
        seconds, at_work = self._subject.seconds, dict[str, float]()
        try:
            left = max(0.0, self._deadline - time.monotonic())
            answers, noise = self.process.communicate(timeout=left)
            crashed, how = True, f"the check {ending(self.process.returncode)}"
        except subprocess.TimeoutExpired:
            at_work = {check.name: seconds_at_work(self.process.pid, check.name) for check in self._checks}
            self.process.kill()
            answers, noise = self._rest()
            crashed, how = False, f"no answer within {seconds:.3g} s"
        said = noise.decode(errors="replace").strip().splitlines()
        how += f"; last output: {said[-1]}" if said else ""

        def end(check: DoctorCheck) -> Finding:
            slow = at_work.get(check.name, 0.0) > WORKING_SHARE * seconds
            return _slow(check, seconds) if slow else failure(check.name, how, check.fix)

        return judge(self._checks, answers, end, in_turn=self._in_turn, crashed=crashed)

    def _rest(self) -> tuple[bytes, bytes]:
        """Returns the output of the killed process."""
        try:
            return self.process.communicate(timeout=LAST_SECONDS)
        except subprocess.TimeoutExpired as late:
            return late.output or b"", late.stderr or b""


def judge(
    checks: Sequence[DoctorCheck],
    answers: bytes,
    end: Callable[[DoctorCheck], Finding],
    *,
    in_turn: bool,
    crashed: bool,
) -> dict[str, list[Finding]]:
    """Returns the findings of each check; of one that did not end, also what happened and what was skipped.

    Args:
        checks: The checks of a process, in the order in which they began.
        answers: The output of the process.
        end: Makes the finding about a check that did not end.
        in_turn: Whether a check begins only if the one before it has ended well.
        crashed: Whether the process ended by itself. The first check that did not end is to blame.
    """
    found: dict[str, list[Finding]] = {check.name: [] for check in checks}
    errors: dict[str, str] = {}
    for line in answers.splitlines(keepends=True):
        if line.endswith(b"\n"):  # a killed process may leave half a line
            name, answer = msgspec.json.decode(line, type=tuple[str, Finding | str])
            if isinstance(answer, str):
                errors[name] = answer
            else:
                found[name].append(answer)
    culprit = ""
    for check in checks:
        told, error, left_out = found[check.name], errors.get(check.name), check.further
        if error == "":
            why = f"{check.name} failed"
        elif culprit:
            left_out, why = (check.name, *check.further), culprit
        else:
            told.append(failure(check.name, f"the check raised {error}", check.fix) if error else end(check))
            why = f"{check.name} {'failed' if told[-1].state == 'failure' else 'did not finish'}"
            culprit = why if in_turn or (crashed and not error) else ""
        known = {finding.name for finding in told}
        told += [skipped(name, why) for name in left_out if name not in known]
    return found


def _slow(check: DoctorCheck, seconds: float) -> Finding:
    busy = f"load {os.getloadavg()[0]:.1f} on {machine.allowed_cores():.3g} core(s)"
    found = f"still at work after {seconds:.3g} s: this machine is slow or busy ({busy})"
    return warning(check.name, found, f"ps-server doctor --timeout {max(60.0, 4 * seconds):.0f}")


def seconds_at_work(pid: int, name: str) -> float:
    """Returns how long a process's first thread, and the one of this name, computed or waited for a core.

    A thread that waits for a lock, a driver, a disk or a name server does neither.
    """
    times = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended, or the kernel does not count
            if name == (task / "comm").read_text().strip() or task.name == str(pid):
                times += sum(map(int, (task / "schedstat").read_text().split()[:2]))
    return times / 1e9


def run_check(check: DoctorCheck, answers: BinaryIO) -> bool:
    """Writes each finding, then an empty string, or the error that ended the check. Returns whether it ended.

    Each line is the JSON array of the check's name and one of these.
    """
    error = ""
    try:
        for finding in check.examine():
            answers.write(msgspec.json.encode((check.name, finding)) + b"\n")
            answers.flush()
    except BaseException as raised:  # a library may exit
        error = " ".join("".join(traceback.format_exception_only(raised)).split())
    answers.write(msgspec.json.encode((check.name, error)) + b"\n")
    answers.flush()
    return not error


def main() -> None:
    """Runs the checks of the process that argv[1] names; argv[2] is the parent's id."""
    name, parent = sys.argv[1:]
    end_with_parent(int(parent))
    subject: Subject = pickle.load(sys.stdin.buffer)  # noqa: S301 - the parent wrote it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no finding
    checks = CHECKS[name](subject)
    if name == "torch":
        all(run_check(check, answers) for check in checks)
    else:
        for check in checks:
            Thread(target=_run_aside, args=(check, answers)).start()


def _run_aside(check: DoctorCheck, answers: BinaryIO) -> None:
    Path(f"/proc/self/task/{get_native_id()}/comm").write_text(check.name)  # for seconds_at_work
    run_check(check, answers)


if __name__ == "__main__":
    main()
