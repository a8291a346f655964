"""The address leads to no server that the worker could talk to."""

from __future__ import annotations

import signal
import socket
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from tests.support.processes.cluster import SMALL, Program
from tests.system.mishaps.mishap import Mishap, Says, Stage

ANY = r"127\.0\.0\.1:\d+"
CHECK = "Check the address, or start a server there: ps-server start"


def free(stage: Stage) -> str:
    """An address on which nothing listens."""
    bound = stage.kept.enter_context(socket.socket())
    bound.bind(("127.0.0.1", 0))
    return address_of(bound)


def address_of(bound: socket.socket) -> str:
    return f"127.0.0.1:{bound.getsockname()[1]}"


def a_stopped_server(stage: Stage) -> Program:
    server, address = stage.cluster.server()
    server.process.send_signal(signal.SIGSTOP)
    return stage.seeker(address)


def another_grpc_service(stage: Stage) -> Program:
    other = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), other)
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    stage.kept.callback(lambda: other.stop(None).wait())
    return stage.seeker(f"127.0.0.1:{port}")


def a_web_server(stage: Stage) -> Program:
    web = stage.cluster.start("web", [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"])
    web.until(lambda: "port " in web.out.read_text(), "port")
    port = web.out.read_text().partition("port ")[2].split()[0]
    return stage.seeker(f"127.0.0.1:{port}")


def a_tls_server(stage: Stage) -> Program:
    door = stage.kept.enter_context(socket.create_server(("127.0.0.1", 0)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def serve() -> None:
        with suppress(OSError):  # the door is closed
            while True:
                line, _ = door.accept()
                line.settimeout(1)
                with line, suppress(OSError):
                    context.wrap_socket(line, server_side=True)

    thread = threading.Thread(target=serve)
    thread.start()
    stage.kept.callback(thread.join)
    stage.kept.callback(lambda: door.shutdown(socket.SHUT_RDWR))
    return stage.seeker(address_of(door))


def join_without_server(stage: Stage) -> Program:
    joining = stage.cluster.run("joining", "hubring.ps.cli", "start", "--join", free(stage))
    joining.until_said("retrying for")
    stage.happens()
    return joining


NO_ANSWER = Mishap(
    "no server at the address",
    "the worker",
    Says(f"no server answers at {ANY}", "no process listens on that port", CHECK, since=r"after \d+ s"),
    lambda stage: stage.seeker(free(stage)),
    code=69,
)

NO_ADDRESS = Mishap(
    "an address without a port",
    "the worker",
    Says("address 'localhost'", "expected HOST:PORT", r"as in 127\.0\.0\.1:5555"),
    lambda stage: stage.worker("--server", "localhost", SMALL, "5"),
)

REACHING = [
    NO_ANSWER,
    NO_ANSWER.but("the server is stopped (SIGSTOP)", a_stopped_server, why="does not answer; it is stopped"),
    NO_ANSWER.but(
        "the port of a web server, or of the status page",
        a_web_server,
        why="a web server listens on that port",
    ),
    NO_ANSWER.but(
        "the port of another server that speaks TLS", a_tls_server, why="uses TLS, but is not a ps-server"
    ),
    NO_ANSWER.but(
        "the port of another gRPC service",
        another_grpc_service,
        why="uses gRPC without TLS, as ps-server does with --insecure",
    ),
    NO_ANSWER.but(
        "an unknown host name",
        lambda stage: stage.seeker("no-such-host.invalid:5555"),
        who="no server answers at no-such-host",
        why="cannot resolve the host name 'no-such-host.invalid'",
        fix=r"start a server there: ps-server start --port 5555 --host 0\.0\.0\.0",
    ),
    NO_ADDRESS,
    NO_ADDRESS.but(
        "a URL for an address",
        lambda stage: stage.worker("--server", "https://127.0.0.1:5555", SMALL, "5"),
        who=r"address 'https://127\.0\.0\.1:5555'",
    ),
    Mishap(
        "`ps-server status` without a server",
        "`ps-server status`",
        Says(f"no server answers at {ANY}", "no process listens", "start one: ps-server start"),
        lambda stage: stage.command("status", free(stage)),
        code=69,
    ),
    Mishap(
        "`ps-server start --join` without a server",
        "the joining host",
        Says(f"no server answers at {ANY}", "no process listens", "start the server first", since="for 10 s"),
        join_without_server,
        code=69,
    ),
]
