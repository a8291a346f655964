"""Every error that a user can see, and its exit code.

    HubringError
    ├── UsageError            2   the command line or a call is invalid
    ├── ConfigError          78   settings or jobs contradict each other
    │   └── HubCannotStep         a lockstep hub averages instead, and the worker's optimizer steps
    ├── ServerUnreachable    69   no server answers, or the server stopped answering
    │   ├── ConnectionLost        one data connection broke; the client retries
    │   ├── ShardAwaited          a shard is missing, and a worker that brings one is awaited
    │   └── JobFailed             the server is up but cannot finish the job
    ├── EngineMissing        69   the program that submits jobs to an engine is not installed
    ├── Fenced               75   this worker lost its place; it is safe to restart it
    ├── RingBroken            1   a member of the ring is lost
    ├── NonFinite             1   a gradient or a parameter is NaN or infinite
    ├── DeadlineExceeded      1   an answer did not arrive in time
    └── CheckpointCorrupt    78   a checkpoint file is damaged, or not from Hubring

`Preempted` is not an error. `optimizer.step()` raises it to stop a script on request.
It derives from SystemExit, so it prints no traceback.
"""

from __future__ import annotations

_CONTINUES = "continues from its last checkpoint, or without --checkpoint-dir from the start"
RESTART_JOB = f"Restart the job; it {_CONTINUES}"
RESTART_ALL = f"Restart the server with the same settings, then the workers; the job {_CONTINUES}"
"""How to fix the loss of a process that the job needs. A worker or a shard cannot know what is saved."""
SHARD_REPLACED = (
    "the standby of this shard has taken its place, because this shard was suspended or not reachable."
    " The job goes on without this shard"
)
STANDBY_GIVEN_UP = (
    "this standby was given up, because it was suspended or its shard could not reach it. The shard goes on"
    " without it"
)


class HubringError(Exception):
    """The base class. Its message names the peer, the value and the fix."""

    exit_code = 1


class UsageError(HubringError):
    """The command line or a call is invalid."""

    exit_code = 2


class ConfigError(HubringError):
    """Settings, launchers, models or jobs contradict each other."""

    exit_code = 78


class HubCannotStep(ConfigError):
    """The hub cannot step as the script's own optimizer would."""


class ServerUnreachable(HubringError):
    """No server answers at the address, or the server stopped answering."""

    exit_code = 69


class ConnectionLost(ServerUnreachable):
    """One data connection broke. The client reconnects and sends again; no push counts twice."""


class ShardAwaited(ServerUnreachable):
    """A shard is missing, and the job waits for a worker that brings one."""


class JobFailed(ServerUnreachable):
    """The server is up but cannot finish the job, for example because a shard died."""


class EngineMissing(HubringError):
    """The program that submits jobs to the engine is not installed on this machine."""

    exit_code = 69


class Fenced(HubringError):
    """This worker's lease expired and it lost its place. A restarted worker can rejoin."""

    exit_code = 75


class RingBroken(HubringError):
    """A member of the ring is lost. The other members cannot reduce without it."""


class NonFinite(HubringError):
    """Training diverged: a gradient or a parameter is NaN or infinite. A restart does not help."""

    fix = (
        "checkpoints are not affected. Lower the learning rate, clip gradients, find a division by zero with"
        " torch.autograd.detect_anomaly, or use a torch.amp.GradScaler, which skips such steps"
    )


class DeadlineExceeded(HubringError):
    """An answer did not arrive within the caller's timeout."""


class CheckpointCorrupt(HubringError):
    """A checkpoint file is missing or truncated, or its digest does not match."""

    exit_code = 78


class Preempted(SystemExit):
    """The job was asked to stop and stopped at a step boundary.

    Exit code 75 tells a scheduler to requeue the job. A signal from a person gives 128+n.
    """

    exit_code = 75

    def __init__(self, text: str, code: int = exit_code) -> None:
        super().__init__(code)
        self.text = text


BY_EXIT_CODE: dict[int, type[HubringError]] = {
    error.exit_code: error for error in (NonFinite, JobFailed, Fenced, ConfigError)
}
"""The error of another process, by the exit code that it sends."""
