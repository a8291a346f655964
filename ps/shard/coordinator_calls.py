"""The coordinator's calls that change a shard's store, on a primary and on its standby."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint import shard_file
from hubring.ps.core.bounds import clean, clean_message
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Code, CoordinatorCall, StoreCommand
from hubring.ps.core.types import INCARNATION_BYTES, Member, View
from hubring.ps.job.control_messages import bucket_from_proto, slice_from_proto
from hubring.ps.shard.loop import ShardLoop

Action = Callable[[ShardLoop], None]
"""Runs in the loop's thread."""

_CODES = {1: Code.NOT_FINITE, 78: Code.MISMATCH}
"""The refusal's code for a failed job, by the exit code of its workers."""


def action(call: CoordinatorCall, index: int) -> Action:
    """Returns what a call does to the loop of shard number `index`. Reads the checkpoint that it names.

    Raises:
        HubringError: The checkpoint cannot be read.
    """
    match call.command:
        case StoreCommand.SET_VIEW:
            return _set_view(pb.View.FromString(call.message))
        case StoreCommand.SET_PLAN:
            return _set_plan(pb.ShardAssignment.FromString(call.message), index)
        case StoreCommand.DRAIN:
            return lambda loop: loop.store.drain()
        case StoreCommand.FAIL:
            return _fail(pb.FailRequest.FromString(call.message))
        case StoreCommand.RESET:
            return lambda loop: loop.reset()
        case StoreCommand.CONFIRM:
            return lambda loop: None


def checked_path(path: str) -> Path:
    """Returns a folder or file that the coordinator named.

    Raises:
        ConfigError: The path is relative, or leaves a folder with `..`.
    """
    checked = Path(path)
    if not checked.is_absolute() or ".." in checked.parts or not path.isprintable():
        raise ConfigError(
            f"the path {clean(path)!r} is relative or has `..`; use an absolute path in --checkpoint-dir"
        )
    return checked


def _set_view(message: pb.View) -> Action:
    members = tuple(
        Member(member.rank, int.from_bytes(member.incarnation[:INCARNATION_BYTES]))
        for member in message.members
    )
    view = View(message.epoch, members, clean_message(message.finished))
    return lambda loop: loop.send(loop.store.on_view(view))


def _set_plan(message: pb.ShardAssignment, index: int) -> Action:
    buckets = [bucket_from_proto(bucket) for bucket in message.buckets]
    slices = [piece for piece in map(slice_from_proto, message.slices) if piece.shard == index]
    keys = [piece.key for piece in slices]
    snapshot = shard_file.load(checked_path(message.restore), keys) if message.restore else None

    def assign(loop: ShardLoop) -> None:
        if message.extends:
            loop.store.extend(slices, buckets, message.version, snapshot)
            return
        loop.assign(slices, buckets)
        if snapshot is not None:
            loop.store.restore(snapshot, message.version)

    return assign


def _fail(message: pb.FailRequest) -> Action:
    code, text = _CODES.get(message.exit_code, Code.JOB_FAILED), clean_message(message.text)
    return lambda loop: loop.send(loop.store.fail(text, code))
