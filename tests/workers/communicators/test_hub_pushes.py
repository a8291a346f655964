"""A worker's pushes to an asynchronous hub are recorded once, and leave the memory once they are taken."""

from __future__ import annotations

from hubring.ps.client.client import AppliedPush
from hubring.workers.communicators.base import Communicator
from tests.support.compare.audited import KINDS
from tests.support.training.ranks import hub_of


def _one_push(communicator: Communicator) -> tuple[bool, list[AppliedPush], list[AppliedPush]]:
    record = hub_of(communicator).record_pushes()
    assert record is not None
    client = communicator._client  # type: ignore[attr-defined]
    client.on_push(3, 1, 2)
    client.on_push(4, 0, 2)
    return hub_of(communicator).record_pushes() is record, list(record.take()), list(record.take())


def test_pushes_are_taken_once_and_from_one_recorder() -> None:
    ranks = KINDS["hub-asp"]()
    try:
        for same, first, second in ranks.run(_one_push):
            assert same
            assert first == [AppliedPush(3, 1, 2), AppliedPush(4, 0, 2)]
            assert second == []
    finally:
        ranks.close()
