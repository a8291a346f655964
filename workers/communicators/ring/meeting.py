"""How a member of a ring that heals finds the members of the next generation, and connects to them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import torch

from hubring.ps.client.board import RingGeneration
from hubring.workers.communicators.ring.call_log import Results
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.dealing import Epoch
from hubring.workers.communicators.ring.group import Notes, RingStore
from hubring.workers.communicators.ring.samples import Position

CONNECT_SECONDS = {"gloo": 10.0, "nccl": 60.0}
"""How long members may take to connect. If one is lost meanwhile, they meet again within this time."""


class Regroup(Protocol):
    """Waits at the server for the generation after this one; `hubring.ps.client.board.Board.regroup`."""

    def __call__(self, generation: int, note: str, *, boundary: bool) -> RingGeneration: ...


class Note(NamedTuple):
    """What a member tells the others when it comes to a meeting.

    Attributes:
        rank: Its rank in the generation that it leaves.
        exchanges: Its last complete exchange.
        step: Its completed steps.
        collectives: Its last complete collective.
        positions: Its position in the samples of each sampler.
        histories: What a newcomer must know of each sampler, by iteration.
        sends: The numbers of the transfers that it has begun to send, and sends again.
    """

    rank: int
    exchanges: int
    step: int
    collectives: int
    positions: tuple[Position, ...] = ()
    histories: tuple[dict[int, Epoch], ...] = ()
    sends: tuple[int, ...] = ()


class Agreed(NamedTuple):
    """A generation that the server has named. All its members know the same of it.

    Attributes:
        members: The members' ranks in the job, by rank in the ring.
        notes: The members' notes, by rank in the ring.
        stays: The ranks that the first of the members had in the generation before. The others are newcomers.
        boundary: Whether all members are between the same two steps.
    """

    number: int
    members: tuple[int, ...]
    notes: tuple[Note, ...]
    stays: tuple[int, ...]
    boundary: bool

    @property
    def old_notes(self) -> tuple[Note, ...]:
        """The notes of the members that have a state; of all in the first generation."""
        return self.notes[: len(self.stays)] or self.notes

    @property
    def step(self) -> int:
        """The completed steps of the member that is ahead."""
        return max(note.step for note in self.old_notes)


class Meeting:
    """The meetings of one member.

    Args:
        identity: The member's rank in the job.
        host: Its address for the other members.
        regroup: Waits at the server for the next generation.
        notes: What the members publish for each other.
        backend: As for `AllreduceCommunicator`.
        compress: As for `AllreduceCommunicator`.
        device: As for `AllreduceCommunicator`.
        timeout: As for `AllreduceCommunicator`.
    """

    def __init__(
        self,
        identity: int,
        host: str,
        regroup: Regroup,
        notes: Notes,
        *,
        backend: str = "gloo",
        compress: str = "",
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
    ) -> None:
        self.identity = identity
        self.compress = compress
        self._regroup = regroup
        self._notes = notes
        self._connect_seconds = CONNECT_SECONDS[backend]
        self._make = partial(
            AllreduceCommunicator,
            host=host,
            backend=backend,
            compress=compress,
            device=device,
            timeout=timeout,
            connect_timeout=self._connect_seconds,
        )

    def agree(self, generation: int, note: Note, *, boundary: bool) -> Agreed:
        """Waits for the generation after this one.

        Args:
            generation: The generation that this member leaves; 0 for none.
            note: What the other members must know.
            boundary: Whether this member is between two steps.

        Raises:
            HubringError: The job has failed.
        """
        named = self._regroup(generation, msgspec.json.encode(note).decode(), boundary=boundary)
        members = tuple(member.rank for member in named.members)
        notes = tuple(_notes.decode(member.note) for member in named.members)
        stays = tuple(note.rank for note, one in zip(notes, named.members, strict=True) if not one.newcomer)
        return Agreed(named.number, members, notes, stays, named.boundary)

    def connect(self, agreed: Agreed, results: Results) -> AllreduceCommunicator:
        """Opens the ring of a generation.

        Args:
            agreed: The generation.
            results: Keeps results of collectives.

        Raises:
            RingBroken: The members could not connect. They meet again.
            HubringError: The job has failed.
        """
        rank = agreed.members.index(self.identity)
        store = RingStore(self._notes, f"ring.{agreed.number}", self._connect_seconds, agreed.number)
        return self._make(rank, len(agreed.members), store, results=results)


_notes = msgspec.json.Decoder(Note)
