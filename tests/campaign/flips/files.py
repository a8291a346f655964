"""The files that a job reads at its start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from cryptography.hazmat.primitives import serialization

from hubring.ps.checkpoint import checkpoint_folder, shard_file
from hubring.ps.checkpoint.checkpoint_folder import FileEntry, Manifest
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec, Slice, TensorSpec
from hubring.ps.security.certificate import Identity
from hubring.ps.security.guard import HEADER, SCHEME, Guard
from hubring.ps.security.keyring import Keyring, make_files
from hubring.ps.store.key_state import KeyState, Snapshot
from tests.campaign.flips.place import Outcome
from tests.campaign.tampering import flipped

BUCKETS = (BucketSpec(0, "float32", "SGD", (TensorSpec("weight", (6, 4)),)),)
SLICES = (Slice(0, 0, 0, 12, 0), Slice(1, 0, 12, 12, 1))
METHOD = {"worker": "Join", "shard": "RegisterShard", "reader": "Status", "operator": "Checkpoint"}
"""A method of Control for each role."""


class CheckpointFile:
    """One file of the newest of two checkpoints.

    Args:
        folder: Where to write the checkpoints.
        file: The file's name.
        share: See `Place`.
    """

    def __init__(self, folder: Path, file: str, share: int) -> None:
        self.name, self.share = f"checkpoint, {file}", share
        self._folder = folder
        self._saved = dict(_write(folder, step) for step in (1, 2))
        self._newest = max(self._saved)
        self._path = self._newest / file
        self._content = self._path.read_bytes()
        self.bits = 8 * len(self._content)

    def flip(self, bit: int) -> Outcome:
        self._path.write_bytes(flipped(self._content, bit))
        try:
            found = checkpoint_folder.newest(self._folder)
            assert found is not None
            path, manifest = found
            loaded = shard_file.load(path, [piece.key for piece in manifest.slices])
        finally:
            self._path.write_bytes(self._content)
        if not _same(loaded, self._saved[path]):
            return Outcome.SILENT
        return Outcome.HARMLESS if path == self._newest else Outcome.DETECTED


def _write(folder: Path, step: int) -> tuple[Path, Snapshot]:
    hidden = checkpoint_folder.begin(folder)
    every: Snapshot = {}
    files = []
    for key in range(2):
        values = torch.arange(12.0) * step + key
        snapshot = {key: KeyState(values, {"momentum_buffer": values / 3}, step, {0: step, 1: step})}
        path = hidden / f"shard-{key}.safetensors"
        written = shard_file.save(path, snapshot)
        files.append(FileEntry(path.name, written.sha256, written.bytes, (key,)))
        every |= snapshot
    manifest = Manifest("flips", "bsp", step, 7, BUCKETS, SLICES, tuple(files))
    return checkpoint_folder.publish(hidden, manifest), every


def _same(one: Snapshot, other: Snapshot) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key].values, other[key].values)
        and torch.equal(one[key].optimizer["momentum_buffer"], other[key].optimizer["momentum_buffer"])
        and (one[key].version, one[key].clocks) == (other[key].version, other[key].clocks)
        for key in one
    )


class TokenFile:
    """The tokens that a client reads, or the certificate's key that a server reads.

    Args:
        folder: Where to write them.
        suffix: Of the file whose bits flip, after the name of the file of the tokens.
    """

    share = 1

    def __init__(self, folder: Path, suffix: str) -> None:
        self._tokens = make_files(folder / "tokens")
        self._path = self._tokens.with_name(self._tokens.name + suffix)
        self.name = "token file" if not suffix else "file of the certificate and its key"
        self._content = self._path.read_bytes()
        self._true = Keyring(self._tokens)
        self.bits = 8 * len(self._content)

    def flip(self, bit: int) -> Outcome:
        self._path.write_bytes(flipped(self._content, bit))
        try:
            found = Keyring(self._tokens)
        except ConfigError:
            return Outcome.DETECTED
        finally:
            self._path.write_bytes(self._content)
        if found.tokens == self._true.tokens and _means(found.identity) == _means(self._true.identity):
            return Outcome.HARMLESS
        objections = list(self._objections(found))
        return Outcome.DETECTED if objections and all(objections) else Outcome.SILENT

    def _objections(self, found: Keyring) -> Iterator[str]:
        """Yields what the true server answers to those tokens that are others."""
        for role, token in self._true.tokens.items():
            given = found.tokens[role]
            if given.secret != token.secret:
                guard = Guard({each: true.secret for each, true in self._true.tokens.items()})
                header = [(HEADER, SCHEME + given.secret)]
                yield guard.objection(f"/hubring.v1.Control/{METHOD[role]}", header)
            if given.digest != token.digest:
                yield "its certificate is not the server's"


def _means(identity: Identity) -> tuple[str, bytes]:
    """Returns the certificate's digest and the key itself; line ends may differ."""
    key = serialization.load_pem_private_key(identity.key, None)
    form, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return identity.digest, key.private_bytes(serialization.Encoding.DER, form, bare)


def files(folder: Path) -> list[CheckpointFile | TokenFile]:
    """Returns the places of all files, which are written in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parts = (("shard-1.safetensors", 3), ("manifest.json", 2), ("manifest.sha256", 1))
    return [
        *(CheckpointFile(folder / name, name, share) for name, share in parts),
        *(TokenFile(_made(folder / f"tokens{suffix}"), suffix) for suffix in ("", ".key")),
    ]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
