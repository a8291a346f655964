"""A checkpoint cannot be read, or not be written."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes.cluster import SMALL, Program, mounted
from tests.system.mishaps.mishap import Mishap, Says, Stage, like_anybody

AFRESH = "Restore the files or their permissions, or use another --checkpoint-dir to start without"
WIDE = "4096"
"""Makes a model of 131 KB, and its momentum another."""


def saved(stage: Stage, steps: int = 10) -> Path:
    """The folder of checkpoints that a job of so many steps left."""
    folder = stage.folder / "saved"
    server, address = stage.cluster.server("--once", "--checkpoint-dir", str(folder), name=f"job-{steps}")
    stage.cluster.worker(address, SMALL, str(steps), name=f"job-{steps}-worker").done()
    server.done()
    return folder


def newest(folder: Path) -> Path:
    """The shard's file in the newest checkpoint."""
    return max(folder.iterdir()) / "shard-0.safetensors"


def a_flipped_bit(stage: Stage) -> Program:
    folder = saved(stage)
    content = bytearray(newest(folder).read_bytes())
    content[-1] ^= 1
    newest(folder).write_bytes(content)
    return stage.server("--checkpoint-dir", str(folder))


def a_torn_file(stage: Stage) -> Program:
    folder = saved(stage)
    saved(stage, 20)
    newest(folder).write_bytes(newest(folder).read_bytes()[:100])
    stage.happens()
    server, address = stage.cluster.server("--once", "--checkpoint-dir", str(folder))
    stage.cluster.worker(address, SMALL, "30")
    return server


def a_locked_file(stage: Stage) -> Program:
    folder = saved(stage)
    newest(folder).chmod(0)
    return stage.server("--checkpoint-dir", str(folder), within=like_anybody())


def a_locked_folder(stage: Stage) -> Program:
    folder = stage.folder / "saved"
    folder.mkdir(mode=0o555)
    return stage.server("--checkpoint-dir", str(folder), within=like_anybody())


def a_folder_in_use(stage: Stage) -> Program:
    folder = stage.folder / "saved"
    stage.cluster.server("--checkpoint-dir", str(folder))
    return stage.server("--checkpoint-dir", str(folder))


def a_full_disk(stage: Stage) -> Program:
    server, address = small_disk(stage)
    stage.cluster.worker(address, SMALL, "10", WIDE)
    return server


def a_full_disk_by_hand(stage: Stage) -> Program:
    _, address = small_disk(stage, "--mode", "asp")  # else it would wait for the next step
    script = [SMALL, "10", WIDE, "hold", str(stage.go), "5"]
    stage.cluster.worker(address, *script).until_said("holding at 5")
    return stage.command("checkpoint", address)


def small_disk(stage: Stage, *flags: str) -> tuple[Program, str]:
    """A server whose checkpoints go to a disk of 64 KiB."""
    folder = stage.folder / "saved"
    folder.mkdir()
    disk = mounted(f"mount -t tmpfs -o size=64k small {folder}")
    stage.happens()
    return stage.cluster.server("--once", *flags, "--checkpoint-dir", str(folder), within=disk)


def no_folder(stage: Stage) -> Program:
    _, address = stage.cluster.server()
    return stage.command("checkpoint", address)


FULL_DISK = Mishap(
    "the disk is full",
    "`ps-server checkpoint`",
    Says(r"cannot write .*shard-0\.safetensors", "No space left on device", r"are free\. Free some space"),
    a_full_disk_by_hand,
)

CHECKPOINTS = [
    Mishap(
        "a flipped bit in the only checkpoint",
        "the server",
        Says(r"shard-0\.safetensors", "does not match its digest; the file was changed or damaged", AFRESH),
        a_flipped_bit,
    ),
    Mishap(
        "a torn file in the newest checkpoint",
        "the server",
        Says(r"shard-0\.safetensors", r"has 100 bytes, expected \d+", "trying the previous checkpoint"),
        a_torn_file,
        code=0,
    ),
    Mishap(
        "a checkpoint that cannot be read",
        "the server",
        Says(r"shard-0\.safetensors", "cannot read .*: Permission denied", AFRESH),
        a_locked_file,
    ),
    Mishap(
        "a folder that cannot be written",
        "the server",
        Says("cannot write checkpoints to .*saved", "Permission denied", "set --checkpoint-dir to a folder"),
        a_locked_folder,
    ),
    Mishap(
        "a checkpoint folder that another server uses",
        "the second server",
        Says(r"pid \d+", "saved is locked by", "use another --checkpoint-dir"),
        a_folder_in_use,
    ),
    Mishap(
        "a checkpoint of another model",
        "the worker",
        Says("the checkpoint .*saved", r"not match .* got 0\.weight \[8, 24\]", "another --checkpoint-dir"),
        lambda stage: stage.newcomer(("--checkpoint-dir", str(saved(stage))), SMALL, "10", "24"),
    ),
    FULL_DISK.but(
        "the disk is full",
        a_full_disk,
        program="the server, after the job",
        who=r"checkpoint failed: .*cannot write .*shard-0\.safetensors",
        since="there is no checkpoint yet",
    ),
    FULL_DISK,
    Mishap(
        "a checkpoint is requested from a server without a folder",
        "`ps-server checkpoint`",
        Says("this server", "writes no checkpoints", "restart the server with --checkpoint-dir"),
        no_folder,
    ),
]
