"""What a hub's checkpoint has of the workers: buffers, frozen parameters, the residuals of compression.

Parameters and the optimizer's state are in the shards. The rest of a model is in the workers, and can differ
by rank. Each rank sends its own state, and one rank sends what all have alike. A worker that joins a running
job gets the state of a live worker, as a new rank of DDP gets that of rank 0.

Law: a state belongs to a step. In lockstep modes a checkpoint has only states of its own step; they come
after the last answer of that step. States are files in a folder of the checkpoint directory, so they survive
a takeover, and a checkpoint links them. The content means nothing to the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint.checkpoint_folder import FileEntry, digest, sync

log = logging.getLogger(__name__)

COLLECT_SECONDS = 30.0
"""How long a checkpoint waits for the states of the workers."""
PART_BYTES = 1 << 20
"""Bytes in one reply."""
RANK_BYTES = 64 << 30
"""Maximum bytes of one state: a residual is as long as the model."""
HELD = 2
"""States of one rank that stay: a worker can take another step while its state is linked."""
LOOK_SECONDS = 0.05
REPEAT_SECONDS = 20.0
"""A rank that has not begun to send its state after this time is asked again: a reply can get lost."""

SHARED = "shared"
_SUFFIX = ".pt"
_COMING = ".{}.{}-{}.coming"
"""A state that is not complete: its name, and the rank and incarnation of its sender."""
_NAME = re.compile(r"(rank-\d+|shared)\.(\d+|pt)")


class WorkerStates:
    """The states of one server's workers.

    Args:
        directory: `--checkpoint-dir`; None keeps the states in a temporary folder, for workers that join.
    """

    def __init__(self, directory: Path | None) -> None:
        self._folder = None if directory is None else directory / ".workers"
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._making = threading.Lock()
        self._asked: dict[int, float] = {}
        """The ranks that are asked for their states, and when to ask each, in monotonic seconds."""
        self._sharers: set[int] = set()
        """Those that are asked for what all ranks have alike, too."""
        self._givers: dict[int, int] = {}
        """The rank that was asked for its state, by the rank that waits for it."""

    def clear(self) -> None:
        """Discards the states of an earlier job."""
        self._asked.clear()
        self._sharers.clear()
        self._givers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def wish(self, rank: int) -> tuple[bool, bool]:
        """Returns whether the reply to a rank's heartbeat asks for its state, and for the shared one too.

        Each wish is returned once, because the state may take many heartbeats to come.
        """
        now = time.monotonic()
        if now < self._asked.get(rank, math.inf):
            return False, False
        self._asked[rank] = now + REPEAT_SECONDS
        return True, rank in self._sharers

    def take(self, part: pb.KeepRequest) -> str:
        """Stores a part of a worker's state; returns why it cannot, or an empty text."""
        name = SHARED if part.shared else f"rank-{part.rank}"
        if part.offset + len(part.content) > RANK_BYTES:
            return f"the state of rank {part.rank} is larger than {RANK_BYTES} bytes"
        if part.offset < 0 or part.step < 0:
            return f"the state of rank {part.rank} has step {part.step} and offset {part.offset}"
        try:
            refused = self._write(self._made(), name, part)
        except OSError as error:
            return f"cannot write to {self._folder or tempfile.gettempdir()}: {error.strerror}"
        if part.rank in self._asked:
            self._asked[part.rank] = time.monotonic() + REPEAT_SECONDS
        if part.last and not part.shared and not refused:
            self._asked.pop(part.rank, None)
            self._sharers.discard(part.rank)
        return refused

    def _write(self, folder: Path, name: str, part: pb.KeepRequest) -> str:
        coming = folder / _COMING.format(name, part.rank, part.incarnation.hex())
        published, end = folder / f"{name}.{part.step}", part.offset + len(part.content)
        if not part.offset:
            for old in folder.glob(_COMING.format(name, part.rank, "*")):  # of earlier lives of this rank
                if old != coming:
                    old.unlink(missing_ok=True)
        elif not coming.exists():
            # The last part comes again if its reply was lost.
            known = part.last and published.exists() and published.stat().st_size == end
            return "" if known else f"the state of rank {part.rank} came without its beginning"
        with coming.open("r+b" if part.offset else "wb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < part.offset or (part.last and size > end):
                return f"the state of rank {part.rank} has {size} bytes before {part.offset} to {end}"
            file.seek(part.offset)  # a part can come twice
            file.write(part.content)
        if part.last:
            coming.rename(published)
            for step in self._steps(name)[:-HELD]:
                (folder / f"{name}.{step}").unlink(missing_ok=True)
        return ""

    async def collect(
        self, folder: Path, step: int | None, ranks: Callable[[], Collection[int]]
    ) -> tuple[FileEntry, ...]:
        """Links the states of a checkpoint into its folder; logs whose are missing.

        Args:
            folder: The new checkpoint's.
            step: Its step in lockstep modes; None takes each rank's newest state.
            ranks: Returns the live workers.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + COLLECT_SECONDS
        while missing := [rank for rank in ranks() if self._lacks(rank, step)]:
            if now() > deadline:
                log.warning(
                    "the checkpoint has no buffers and residuals of rank %s, which did not send them within"
                    " %.0f s; a restarted worker of that rank gets the buffers of another one",
                    ", ".join(map(str, missing)),
                    COLLECT_SECONDS,
                )
                break
            await asyncio.sleep(LOOK_SECONDS)
        return await asyncio.to_thread(self._link, folder, step)

    def ask(self, ranks: Collection[int]) -> None:
        """Asks live workers for their states, and the lowest of them for what all have alike."""
        self._asked.update(dict.fromkeys(ranks, 0.0))
        self._sharers.update(sorted(ranks)[:1])

    def answer(self, request: pb.KeptRequest, restored: Path | None, live: Collection[int]) -> pb.KeptReply:
        """Returns the names of the states for a worker, or a part of one.

        Args:
            request: What it asks.
            restored: The checkpoint from which the job resumed.
            live: The ranks of the live workers.
        """
        if request.name:
            return self._read(request, restored)
        if not request.live:
            return _names(request.rank, restored)
        others = set(live) - {request.rank}
        giver = self._givers.get(request.rank)
        if giver in others and giver not in self._asked:
            self._givers.pop(request.rank)
            return pb.KeptReply(own=self._newest(f"rank-{giver}"), shared=self._newest(SHARED))
        if giver not in others and others:
            self._givers[request.rank] = giver = min(others)
            self.ask([giver])
        return pb.KeptReply(waits=True) if others else _names(request.rank, restored)

    def _made(self) -> Path:
        with self._making:  # several ranks begin at once
            if self._folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="hubring-states-")
                self._folder = Path(self._temporary.name)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            return self._folder

    def _steps(self, name: str) -> list[int]:
        """Returns the steps of the states that are there, ascending."""
        folder = self._folder
        found = [] if folder is None else folder.glob(f"{name}.*")
        return sorted(int(path.suffix[1:]) for path in found)

    def _newest(self, name: str) -> str:
        steps = self._steps(name)
        return f"{name}.{steps[-1]}" if steps else ""

    def _lacks(self, rank: int, step: int | None) -> bool:
        """Whether a rank will send its state of a step. Each that does so at all has begun to."""
        name = f"rank-{rank}"
        if step is None:
            return rank in self._asked and self._sends(name)
        return step not in self._steps(name) and self._sends(name)

    def _sends(self, name: str) -> bool:
        begun = () if self._folder is None else self._folder.glob(_COMING.format(name, "*", "*"))
        return any(begun) or bool(self._steps(name))

    def _link(self, folder: Path, step: int | None) -> tuple[FileEntry, ...]:
        if self._folder is None or not self._folder.is_dir():
            return ()
        entries = []
        for name in sorted({path.stem for path in self._folder.iterdir() if _NAME.fullmatch(path.name)}):
            # What all ranks have alike is sent again only if it has changed.
            steps = [one for one in self._steps(name) if step is None or one <= step]
            if not steps or (name != SHARED and step not in (None, steps[-1])):
                continue
            source, path = self._folder / f"{name}.{steps[-1]}", folder / f"{name}{_SUFFIX}"
            if not source.stat().st_size:
                continue
            try:
                os.link(source, path)
            except OSError:  # a file system without hard links
                shutil.copyfile(source, path)
            sync(path)
            entries.append(FileEntry(path.name, digest(path), path.stat().st_size, ()))
        return tuple(entries)

    def _read(self, request: pb.KeptRequest, restored: Path | None) -> pb.KeptReply:
        folder = restored if request.name.endswith(_SUFFIX) else self._folder
        if folder is None or not _NAME.fullmatch(request.name):
            return pb.KeptReply()
        try:
            with (folder / request.name).open("rb") as file:
                file.seek(request.offset)
                return pb.KeptReply(content=file.read(PART_BYTES), total=os.fstat(file.fileno()).st_size)
        except OSError as error:
            log.warning("cannot read the state %s: %s", folder / request.name, error)
            return pb.KeptReply(total=-1)


def _names(rank: int, restored: Path | None) -> pb.KeptReply:
    """Returns the names of the states that a checkpoint has for a rank."""
    if restored is None:
        return pb.KeptReply()
    ranks = sorted(int(path.stem[5:]) for path in restored.glob(f"rank-*{_SUFFIX}"))
    chosen = rank if rank in ranks else min(ranks, default=None)
    shared = f"{SHARED}{_SUFFIX}"
    return pb.KeptReply(
        own="" if chosen is None else f"rank-{chosen}{_SUFFIX}",
        mine=chosen == rank,
        shared=shared if (restored / shared).exists() else "",
    )
