"""A ring that heals: tensors that one member sends to another one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.collectives import barrier, recv, recv_async, send, send_async
from hubring.workers.communicators.ring.healing.healing_ring import HealingRing
from hubring.workers.communicators.ring.process_group import Launch, Ring
from tests.support.training.healing import HealingRanks, together
from tests.support.training.ranks import LIMIT

pytestmark = pytest.mark.slow


def test_transfers_reach_the_same_members_after_a_loss() -> None:
    """The script still has the old ranks: one receiver called before the loss, the others call after it."""
    ranks = HealingRanks(4)

    def live(ring: HealingRing) -> Any:
        own = ring.rank
        early = recv_async(0, "early", communicator=ring) if own == 3 else None
        barrier(communicator=ring)
        if own == 1:
            return ranks.lose(1)
        barrier(communicator=ring)  # ends in the next generation
        if own == 0:
            send(torch.tensor([7.0]), 3, "early", communicator=ring)
            send(torch.tensor([2.0]), 2, communicator=ring)
            send(torch.tensor([3.0]), 3, communicator=ring)
            return None
        if early is None:
            return recv(0, communicator=ring).item()
        return early.get(LIMIT).item(), recv(0, communicator=ring).item()

    assert together(ranks, live) == [None, None, 2.0, (7.0, 3.0)]


def test_one_end_may_have_called_before_ranks_changed_and_the_other_one_behind() -> None:
    ranks = HealingRanks(3)

    def live(ring: HealingRing) -> Any:
        own = ring.rank
        early = send_async(torch.tensor([5.0]), 2, "x", communicator=ring) if own == 0 else None
        if own == 1:
            return ranks.lose(1)
        barrier(communicator=ring)
        ring.between_steps(1)
        assert (ring.rank, ring.size) == (min(own, 1), 2)
        if early is None:
            return recv(0, "x", communicator=ring).item()
        return early.wait(LIMIT)

    assert together(ranks, live) == [None, None, 5.0]


def test_a_transfer_to_or_from_a_lost_member_is_refused() -> None:
    ranks = HealingRanks(3)

    def live(ring: HealingRing) -> Any:
        own = ring.rank
        works = []
        if own == 0:
            works = [send_async(torch.ones(1), 1, "to", communicator=ring)]
        elif own == 2:
            works = [recv_async(1, "from", communicator=ring)]
        barrier(communicator=ring)
        if own == 1:
            return ranks.lose(1)
        barrier(communicator=ring)
        works.append(send_async(torch.ones(1), 1, "later", communicator=ring))
        for work in works:
            with pytest.raises(RingBroken, match="rank 1 is lost"):
                work.wait(LIMIT)
        return True

    assert together(ranks, live) == [True, None, True]


@pytest.mark.parametrize("end", [0, 2], ids=["sender", "receiver"])
@pytest.mark.parametrize("message", range(4), ids=["head", "tensor", "confirmation", "acknowledgement"])
def test_each_tensor_arrives_once_if_a_third_member_is_lost_meanwhile(
    end: int, message: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss interrupts the second of three transfers with one name, before a message of it on one end."""
    ranks, cut = HealingRanks(3), threading.Event()
    exchanged: list[str] = []
    real_exchange, real_abort = Ring.exchange, Ring.abort

    def exchange(ring: Ring, whose: Work, launch: Launch) -> None:
        if ring.rank == end and ring.size == 3:
            exchanged.append(whose.what)
            if len(exchanged) == 4 + message + 1:
                ranks.lose(1)
                ranks.beat()
                assert cut.wait(LIMIT)
        real_exchange(ring, whose, launch)

    def abort(ring: Ring, error: HubringError) -> None:
        real_abort(ring, error)
        if ring.rank == end:
            cut.set()

    monkeypatch.setattr(Ring, "exchange", exchange)
    monkeypatch.setattr(Ring, "abort", abort)
    over = threading.Event()

    def live(ring: HealingRing) -> Any:
        own = ring.rank
        if own == 0:
            for value in range(3):
                send(torch.tensor([value]), 2, communicator=ring)
            return None
        if own == 1:
            assert over.wait(LIMIT)
            return None
        came = [recv(0, communicator=ring).item() for _ in range(3)]
        over.set()
        return came

    assert together(ranks, live) == [None, None, [0, 1, 2]]
    assert 1 not in ranks.live
