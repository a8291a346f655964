"""The board on which the members of a ring find each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator import regroup_service
from tests.support.fakes.coordinator import CONTEXT, Hub, regroup, ring, vanish


async def ask(hub: Hub, member: pb.JoinReply, **fields: Any) -> pb.RendezvousReply:
    request = pb.RendezvousRequest(rank=member.rank, incarnation=member.incarnation, **fields)
    return await hub.control.Rendezvous(request, CONTEXT)


async def test_a_key_is_read_with_its_folder() -> None:
    hub, (one, two) = await ring()
    for key in ("ring.1/0/0", "ring.1/0/1", "ring.1/1/0", "ring.1/0", "ring.10/0/0", "alone"):
        assert (await ask(hub, one, key=key, value=f"of {key}")).value
    reply = await ask(hub, two, key="ring.1/0/0", wait_seconds=5)
    assert (reply.value, dict(reply.folder)) == ("of ring.1/0/0", {"1": "of ring.1/0/1"})
    reply = await ask(hub, two, key="alone")
    assert (reply.value, dict(reply.folder)) == ("of alone", {})


async def test_a_reply_holds_a_part_of_a_large_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regroup_service, "FOLDER_BYTES", 20)

    hub, (one, two) = await ring()
    for name in "abcd":
        await ask(hub, one, key=f"f/{name}", value="12345")
    for name in "abcd":
        reply = await ask(hub, two, key=f"f/{name}")
        assert (reply.value, len(reply.folder)) == ("12345", 2)


async def test_a_forgotten_folder_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regroup_service, "RANK_KEYS", 3)

    hub, (one, two) = await ring()
    await ask(hub, one, key="kept", value="v")
    for generation in range(5):
        for name in ("listener/0", "0/0"):
            await ask(hub, one, key=f"ring.{generation}/{name}", value="v")
        await ask(hub, two, forget=f"ring.{generation}")
    assert not (await ask(hub, two, key="ring.4/0/0")).value
    assert (await ask(hub, two, key="kept")).value == "v"


async def test_members_stop_waiting_for_one_that_is_lost() -> None:
    hub, (one, two, three) = await ring(3)
    await vanish(hub, three)
    assert not (await ask(hub, one, key="ring.1/0/2", generation=1)).broken  # it may come back
    waiting = [
        asyncio.create_task(ask(hub, member, key="ring.1/0/2", generation=1, wait_seconds=10.0))
        for member in (one, two)
    ]
    await asyncio.sleep(0)
    await hub.tick_after(10.0)
    assert [(reply.value, reply.broken) for reply in await asyncio.gather(*waiting)] == [("", True)] * 2
    await asyncio.gather(*(regroup(hub, member, 1) for member in (one, two)))
    assert (await ask(hub, one, key="ring.1/0/2", generation=1)).broken
    assert not (await ask(hub, one, key="ring.2/0/1", generation=2)).broken
    assert not (await ask(hub, one, key="other")).broken
