"""What the context tells those it builds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ps.config import WorkerConfig
from ps.errors import RingBroken
from workers import context


@pytest.mark.parametrize(
    ("server", "place"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("hub.example", "the way to hub.example")],
)
def test_a_ring_meets_where_rank_0_is_seen_from_the_server(
    monkeypatch: pytest.MonkeyPatch, server: str, place: str
) -> None:
    """Its host may have a way to the server and none to anywhere else, as compute nodes do."""

    def asked(rank: int, host: str, *_: Any) -> None:
        raise RingBroken(host)

    monkeypatch.setattr(context, "ring_store", asked)
    monkeypatch.setattr(context, "towards", lambda host: f"the way to {host}")
    session: Any = SimpleNamespace(address=f"{server}:5555", sender=SimpleNamespace(rank=0))
    with pytest.raises(RingBroken, match=f"^{place}$"):
        context._ring(WorkerConfig(), session, torch.device("cpu"))
