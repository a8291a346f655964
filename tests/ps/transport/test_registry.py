"""Each shard is reached by the fastest transport that works, and who cannot be reached is told why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubring.ps.client.client import KVClient
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.core.types import Sender
from hubring.ps.transport.host import host_id
from hubring.ps.transport.registry import FASTEST_FIRST, Dial, ShardAddress, choose, open_doors, transport
from tests.support.transports.messages import PATIENCE, ask, content, is_echoed, noise, request
from tests.support.transports.serving import Serving


@pytest.fixture
def address() -> Iterator[ShardAddress]:
    """A shard on this host that echoes by every transport."""
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(Serving(transport(name))) for name in FASTEST_FIRST}
        yield ShardAddress(host_id(), {name: server.address for name, server in servers.items()})


def talks(dial: Dial, shard: int) -> bool:
    with contextlib.closing(dial(shard)) as connection:
        return is_echoed(connection, 100)


def test_a_shard_on_another_host_is_reached_by_zeromq(address: ShardAddress) -> None:
    kind, dial, wired = choose([address._replace(host_id="elsewhere")])
    assert (kind.name, wired) == ("zmq", True)
    assert talks(dial, 0)


def test_an_unreachable_transport_is_skipped(address: ShardAddress, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    kind, dial, wired = choose(
        [address._replace(addresses={**address.addresses, "shm": "shm://x", "zmq": "tcp://127.0.0.1:1"})]
    )
    assert (kind.name, wired) == ("grpc", True)
    assert talks(dial, 0)
    said = [record.message.split(":")[0] for record in caplog.records]
    assert said == ["cannot reach shard 0 with shm", "cannot reach shard 0 with zmq"]


def test_near_and_far_shards_go_each_their_way_from_one_memory(address: ShardAddress) -> None:
    kind, dial, wired = choose([address._replace(host_id="elsewhere"), address])
    assert (kind.name, wired) == ("shm", True)
    memory = kind.allocate(1000)
    memory[:] = noise(1000)
    for shard in (0, 1):
        with contextlib.closing(dial(shard)) as connection:
            assert content(ask(connection, request(1, memory))) == bytes(memory)


@pytest.mark.parametrize("want", FASTEST_FIRST)
def test_a_pinned_transport_is_taken(address: ShardAddress, want: str) -> None:
    kind, dial, wired = choose([address], want)
    assert (kind.name, wired) == (want, want != "shm")
    assert talks(dial, 0)


@pytest.mark.parametrize("name", ["zmq", "grpc"])
def test_only_a_process_of_the_shards_user_and_host_may_come_by_its_unix_socket(
    name: str, address: ShardAddress, tmp_path: Path
) -> None:
    """No process listens over TCP, so a worker that wants or needs TCP reaches nothing."""
    tmp_path.chmod(0o700)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Serving(transport(name), place=str(tmp_path / "socket")))
        shard = address._replace(
            addresses={
                name: address.addresses[name].rpartition(":")[0] + ":1",
                f"{name}-unix": listener.address,
            }
        )
        assert talks(choose([shard], name).dial, 0)
        for far, want in ((shard, f"{name}-tcp"), (shard._replace(host_id="elsewhere"), name)):
            with pytest.raises(ServerUnreachable, match=":1"):
                choose([far], want)
        tmp_path.chmod(0o755)  # another user could have made the socket
        with pytest.raises(ServerUnreachable, match=":1"):
            choose([shard], name)


@pytest.mark.parametrize("want", FASTEST_FIRST)
def test_a_shard_that_moves_before_a_worker_is_connected_is_found_again(want: str) -> None:
    """The shard is killed between the choice of its transport and the worker's first connection."""
    with Serving(transport(want)) as shard, Serving(transport(want)) as standby:
        places = [ShardAddress(host_id(), {want: server.address}) for server in (shard, standby)]
        dial = choose(places[:1], want, locate=lambda number: places[1]).dial
        shard.stop()
        client = KVClient(Sender(0, 1), 1, dial)
        try:
            client.wait_connected(PATIENCE)
        finally:
            client.close()


def test_a_pinned_transport_that_fails_names_the_mend(address: ShardAddress) -> None:
    with pytest.raises(ServerUnreachable, match=r"shm: .* another host.*--transport auto"):
        choose([address._replace(host_id="elsewhere")], "shm")


def test_a_shard_that_nobody_reaches_is_told_with_every_address(address: ShardAddress) -> None:
    dead = {"shm": "shm://nobody", "zmq": "tcp://127.0.0.1:1", "grpc": "127.0.0.1:1"}
    with pytest.raises(ServerUnreachable) as caught:
        choose([address, ShardAddress(host_id(), dead)])
    assert all(each in str(caught.value) for each in dead.values())
    assert "shard 1" in str(caught.value)


def test_an_unknown_transport_is_a_setting_gone_wrong() -> None:
    with pytest.raises(ConfigError, match=r"'rdma'.*auto, shm, zmq, grpc"):
        transport("rdma")


def test_listeners_open_by_every_transport_and_none_is_left_when_one_fails() -> None:
    listeners = open_doors("127.0.0.1").listeners
    assert tuple(listeners) == (*FASTEST_FIRST, "zmq-unix", "grpc-unix")
    addresses = {name: each.address for name, each in listeners.items()}
    kind, *_ = choose([ShardAddress(host_id(), addresses)])
    assert kind.name == "shm"
    sockets = [Path(addresses[f"{name}-unix"].partition(":")[2]) for name in ("zmq", "grpc")]
    assert all(map(Path.is_socket, sockets))
    for listener in listeners.values():
        listener.close()
    assert not any(map(Path.exists, sockets))
    with pytest.raises(ConfigError, match=r"no\.such\.host"):
        open_doors("no.such.host.invalid")
