"""Every error a user can meet, and the exit code each ends a program with.

    HubringError
    ├── UsageError            2   the command line or a call is wrong
    ├── ConfigError          78   settings contradict each other, or the job does
    ├── ServerUnreachable    69   no server, or it went away
    │   ├── ConnectionLost        one data connection broke; the client retries
    │   └── JobFailed             the server is there, the job is beyond help
    ├── EngineMissing        69   the program that hands jobs to an engine is not there
    ├── Fenced               75   this worker lost its place; safe to start again
    ├── RingBroken            1   a member of the ring is gone, so no result can be had
    ├── NonFinite             1   a gradient or a parameter is NaN or infinite
    ├── DeadlineExceeded      1   an answer did not come in time
    └── CheckpointCorrupt    78   a file is torn, flipped or not ours

`Preempted` is no error: it is how `optimizer.step()` ends a script that was
asked to stop, so it derives from SystemExit and unwinds in silence.
"""

from __future__ import annotations


class HubringError(Exception):
    """Base of the tree; its message names the peer, the value and the mend."""

    exit_code = 1


class UsageError(HubringError):
    """The command line or a call cannot mean anything."""

    exit_code = 2


class ConfigError(HubringError):
    """Settings, launchers, models or jobs contradict each other."""

    exit_code = 78


class ServerUnreachable(HubringError):
    """No server answers at the address, or it stopped answering."""

    exit_code = 69


class ConnectionLost(ServerUnreachable):
    """One data connection broke. The client redials and sends again: no push counts twice."""


class JobFailed(ServerUnreachable):
    """The server lives but cannot finish the job, a shard having died for example."""


class EngineMissing(HubringError):
    """The program that would take a job to its engine is not on this machine."""

    exit_code = 69


class Fenced(HubringError):
    """This worker's lease ran out and its place is taken; a fresh start may rejoin."""

    exit_code = 75


class RingBroken(HubringError):
    """A member of the ring is gone; the others cannot reduce without it."""


class NonFinite(HubringError):
    """Training has diverged: a gradient or a parameter is NaN or infinite. To start again does not help."""

    mend = (
        "nothing of it is saved, and the checkpoint before stays good. Lower the learning rate, clip"
        " gradients, look for a division by zero (torch.autograd.detect_anomaly finds the line), or take a"
        " torch.amp.GradScaler, which skips such steps"
    )


class DeadlineExceeded(HubringError):
    """An answer did not come within the time that the caller gave."""


class CheckpointCorrupt(HubringError):
    """A checkpoint's file is missing, torn, or differs from its digest."""

    exit_code = 78


class Preempted(SystemExit):
    """The job was asked to stop and has stopped at a step boundary.

    Exit code 75 tells a scheduler that the job may be queued again;
    128+n is for a signal that a person sent.
    """

    exit_code = 75

    def __init__(self, text: str, code: int = exit_code) -> None:
        super().__init__(code)
        self.text = text
