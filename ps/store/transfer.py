"""A store's whole state as changes, for a standby that follows it from the middle of a job.

Law: a store that applies these changes, after the coordinator's plans and last view, equals the one that
they come from, except for its counters, and for the clocks of late workers in lockstep, which it expects in
the open round (`PushRounds.follow`). The plans make the keys, so a transfer has only what changed since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.messages import NO_KEY, Change, Code, CollectiveResult, Refusal, Reply, Transfer
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import Sender
from hubring.ps.store.collective_rounds import RoundBook
from hubring.ps.store.key_state import KeyEntry, Settled
from hubring.ps.store.key_table import KeyTable

_T = TypeVar("_T")

_FACTS, _STATE = "facts", "state "


class _KeyFacts(msgspec.Struct):
    """What a key has besides tensors. Dictionaries are by rank."""

    version: int
    initialised: bool
    drain_from: int | None
    clocks: dict[int, int]
    left: dict[int, int]
    settled: dict[int, Settled]
    read: dict[int, int]
    late: list[int]
    fresh: tuple[int, ...]
    cuts: tuple[int, ...]


class _SenderFacts(msgspec.Struct):
    """The replies that a sender of collectives has not confirmed. `results` has the tensors of each."""

    rank: int
    incarnation: str
    settled: int
    results: dict[int, int]
    refusals: dict[int, tuple[int, str]]


def changes(entries: KeyTable, book: RoundBook, restored: Sequence[int] | None = None) -> Iterator[Change]:
    """Yields a store's state, or only that of its keys that were just restored: nothing of them is open.

    The tensors are copies, or do not change while their round is open.
    """
    if restored is not None:
        yield from (_of_key(entries[key]) for key in restored if key in entries)
        return
    for entry in entries.values():
        yield _of_key(entry)
        yield from entry.writes.writes(entry.key, entry.version)
    yield _of_collectives(book)
    yield from book.open_parts()


def take(transfer: Transfer, entries: KeyTable, book: RoundBook) -> None:
    """Applies a transfer from `changes`."""
    if transfer.key == NO_KEY:
        _take_collectives(transfer, book)
    else:
        _take_key(transfer, entries[transfer.key])


def _of_key(entry: KeyEntry) -> Transfer:
    state = entry.state()
    facts = _KeyFacts(
        version=entry.version,
        initialised=entry.initialised,
        drain_from=None if entry.drain_from == inf else int(entry.drain_from),
        clocks=entry.clocks,
        left=entry.left,
        settled=entry.settled,
        read=entry.read,
        late=sorted(entry.late),
        fresh=state.fresh,
        cuts=state.cuts,
    )
    tensors = {"values": entry.values.clone()}
    tensors |= {
        f"{_STATE}{name}": tensor.clone() if entry.coded else tensor for name, tensor in state.tensors.items()
    }
    if entry.coded is not None:
        tensors["code"] = entry.coded.latest.payload.clone()
    return Transfer(entry.key, _with_facts(tensors, facts))


def _take_key(transfer: Transfer, entry: KeyEntry) -> None:
    facts = _facts(transfer.tensors, _KeyFacts)
    states = [name for name in transfer.tensors if name.startswith(_STATE)]
    named = {name.removeprefix(_STATE): transfer.tensors[name] for name in states}
    entry.write(transfer.tensors["values"], OptimizerState(named, facts.fresh, facts.cuts))
    if entry.coded is not None:
        entry.coded.latest.payload.copy_(transfer.tensors["code"])
    entry.version, entry.initialised = facts.version, facts.initialised
    entry.drain_from = inf if facts.drain_from is None else facts.drain_from
    entry.clocks, entry.left = facts.clocks, facts.left
    entry.settled, entry.read, entry.late = facts.settled, facts.read, set(facts.late)


def _of_collectives(book: RoundBook) -> Transfer:
    tensors: dict[str, Tensor] = {}
    facts = []
    for number, (sender, (settled, replies)) in enumerate(book.unconfirmed().items()):
        results: dict[int, int] = {}
        refusals: dict[int, tuple[int, str]] = {}
        for call, reply in replies.items():
            if isinstance(reply, CollectiveResult):
                results[call] = len(reply.tensors)
                tensors |= {f"{number} {call} {at}": one for at, one in enumerate(reply.tensors)}
            elif isinstance(reply, Refusal):
                refusals[call] = reply.code.value, reply.text
        facts.append(_SenderFacts(sender.rank, f"{sender.incarnation:x}", settled, results, refusals))
    return Transfer(NO_KEY, _with_facts(tensors, facts))


def _take_collectives(transfer: Transfer, book: RoundBook) -> None:
    for number, each in enumerate(_facts(transfer.tensors, list[_SenderFacts])):
        replies: dict[int, Reply] = {
            call: CollectiveResult(
                tuple(transfer.tensors[f"{number} {call} {at}"].clone() for at in range(count))
            )
            for call, count in each.results.items()
        }
        replies |= {call: Refusal(Code(code), text) for call, (code, text) in each.refusals.items()}
        book.restore(Sender(each.rank, int(each.incarnation, 16)), each.settled, replies)


def _with_facts(tensors: dict[str, Tensor], facts: object) -> dict[str, Tensor]:
    encoded = bytearray(msgspec.json.encode(facts))
    return {**tensors, _FACTS: torch.frombuffer(encoded, dtype=torch.uint8)}


def _facts(tensors: Mapping[str, Tensor], kind: type[_T]) -> _T:
    return msgspec.json.decode(tensors[_FACTS].numpy().tobytes(), type=kind)
