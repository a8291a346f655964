"""What another user of the host, or another host, tries on a hub; prints what came of each try as JSON.

python -m tests.support.scripts.stranger SERVER TOKEN_FILE PID_OF_SHARD
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import grpc
import zmq

from hubring.protos import control_pb2 as pb
from hubring.protos import data_pb2
from hubring.protos.control_pb2_grpc import ControlStub, ShardControlStub
from hubring.ps.core.types import PROTOCOL
from hubring.ps.security.access import Access
from hubring.ps.transport.base import Message, sealed
from hubring.ps.transport.grpc.channel import open_channel
from hubring.ps.transport.grpc.frame import to_frames
from tests.support.certificates import stranger_access

NOBODY = 65534
SECONDS = 5.0
LISTENS = "0A"  # TCP_LISTEN
GUESSES = [number.to_bytes(24) for number in (0, 1, 2, 3, 1 << 128)]
CALLS: dict[str, Any] = {
    "Join": pb.JoinRequest(protocol=PROTOCOL, token="t", job="x", topology="hub", rank=-1),
    "Heartbeat": pb.HeartbeatRequest(incarnation=GUESSES[1]),
    "Connect": pb.ConnectRequest(token="t"),
    "Leave": pb.LeaveRequest(incarnation=GUESSES[1], text="\x1b[31mred"),
    "Plan": pb.PlanRequest(incarnation=GUESSES[1]),
    "Rendezvous": pb.RendezvousRequest(incarnation=GUESSES[1], key="k", value="v"),
    "Clock": pb.ClockRequest(),
    "Status": pb.StatusRequest(),
    "Checkpoint": pb.CheckpointRequest(),
    "RotateToken": pb.RotateTokenRequest(),
    "RegisterShard": pb.RegisterShardRequest(protocol=PROTOCOL, token="t"),
    "ShardHeartbeat": pb.ShardHeartbeatRequest(token="t"),
}
ORDERS: dict[str, Any] = {
    "SetView": pb.View(epoch=99),
    "SetPlan": pb.ShardAssignment(restore="/etc/passwd"),
    "Drain": pb.DrainRequest(),
    "Fail": pb.FailRequest(text="\x1b[31mred", exit_code=1),
    "Reset": pb.ResetRequest(),
    "Save": pb.SaveRequest(directory="/tmp", step=-1),
    "Stats": pb.StatsRequest(),
}
"""Calls of ShardControl."""


def outcome(attempt: Callable[[], object]) -> str:
    """How a try ended, in one word."""
    try:
        found = attempt()
    except grpc.RpcError as error:
        return str(error.code().name)
    except OSError as error:
        return type(error).__name__
    return found if isinstance(found, str) else "allowed"


def call(stub: Any, name: str, request: Any) -> None:
    answer = getattr(stub, name)(request, timeout=SECONDS)
    if name == "Connect":
        next(iter(answer))


def pull(incarnation: bytes) -> bytes:
    header = data_pb2.Header(request=1, rank=0, incarnation=incarnation)
    header.pull.key = 0
    return header.SerializeToString()


def by_grpc(address: str, access: Access) -> None:
    with open_channel(address, access) as channel:
        exchange: Any = channel.stream_stream("/hubring.v1.Data/Exchange")
        frames = [frame for guess in GUESSES for frame in to_frames(Message(pull(guess), None))]
        next(iter(exchange(iter(frames), timeout=SECONDS)))


def by_zmq(host: str, port: int) -> str:
    """What a guessed incarnation gets without the shard's secret: no handshake, and so no answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{host}:{port}")
        for guess in GUESSES:
            dealer.send(sealed(Message(pull(guess), None)))
        bodies = set()
        for _ in GUESSES:
            if not dealer.poll(int(1000 * SECONDS)):
                return "silence"
            header, *payload = dealer.recv_multipart()
            bodies.add(data_pb2.Header.FromString(header).WhichOneof("body"))
            assert not payload
        return " ".join(sorted(map(str, bodies)))


def by_shared_memory(name: str) -> str:
    """Whether the shard answers on its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(SECONDS)
        door.connect("\0" + name)
        door.send(b"x" * 64)
        return "allowed" if door.recv(1) else "closed"


def by_unix_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)


def table(pid: int, name: str) -> list[list[str]]:
    """Returns the sockets in the network of a process, which can be another than ours."""
    with open(f"/proc/{pid}/net/{name}") as lines:
        return [line.split() for line in lines][1:]


def main(server: str, token_file: str, shard: int) -> None:
    inodes = {os.readlink(f"/proc/{shard}/fd/{fd}") for fd in os.listdir(f"/proc/{shard}/fd")}
    rows = [*table(shard, "tcp"), *table(shard, "tcp6")]  # gRPC's sockets are of IPv6, also for IPv4
    tcp = (row for row in rows if f"socket:[{row[9]}]" in inodes and row[3] == LISTENS)
    ports = [int(row[1].rpartition(":")[2], 16) for row in tcp]
    bound = [row for row in table(shard, "unix") if len(row) > 7 and f"socket:[{row[6]}]" in inodes]
    names = [row[7][1:] for row in bound if row[7][0] == "@"]
    paths = [row[7] for row in bound if row[7][0] == "/"]
    access = stranger_access(server, SECONDS)
    for module in iter_modules(grpc.__path__, "grpc."):  # another user may not read the folder, even later
        if module.name.startswith("grpc._"):
            import_module(module.name)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    tries: dict[str, str] = {"token file": outcome(Path(token_file).read_text)}
    host = server.rpartition(":")[0]
    for secret in ("", "0" * 64):
        with open_channel(server, access._replace(secret=secret)) as channel:
            for name, request in CALLS.items():
                tries[f"{name} {secret[:1]}"] = outcome(partial(call, ControlStub(channel), name, request))
    for port in ports:
        address = f"{host}:{port}"
        try:
            access = stranger_access(address, SECONDS)
        except OSError:  # the port of ZeroMQ
            tries["zmq"] = outcome(partial(by_zmq, host, port))
            continue
        with open_channel(address, access) as channel:
            for name, request in ORDERS.items():
                tries[name] = outcome(partial(call, ShardControlStub(channel), name, request))
        tries["Exchange"] = outcome(partial(by_grpc, address, access))
    for name in names:
        tries[f"shm {name[:7]}"] = outcome(partial(by_shared_memory, name))
    for path in paths:
        tries[f"unix {path}"] = outcome(partial(by_unix_socket, path))
    print(json.dumps(tries))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
