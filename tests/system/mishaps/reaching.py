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
from tests.system.mishaps.mishap import Mishap, Stage

ANY = r"127\.0\.0\.1:\d+"
CHECK = "Check the address, or start a server there: ps-server start"


def no_listener(stage: Stage) -> Program:
    free = stage.kept.enter_context(socket.socket())
    free.bind(("127.0.0.1", 0))
    return look_for(stage, free)


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
    return look_for(stage, door)


def an_unknown_host(stage: Stage) -> Program:
    return stage.seeker("no-such-host.invalid:5555")


def no_port(stage: Stage) -> Program:
    return stage.worker("--server", "localhost", SMALL, "5")


def a_url(stage: Stage) -> Program:
    return stage.worker("--server", "https://127.0.0.1:5555", SMALL, "5")


def status_without_server(stage: Stage) -> Program:
    free = stage.kept.enter_context(socket.socket())
    free.bind(("127.0.0.1", 0))
    stage.happens()
    return stage.cluster.run("status", "hubring.ps.cli", "status", f"127.0.0.1:{free.getsockname()[1]}")


def join_without_server(stage: Stage) -> Program:
    free = stage.kept.enter_context(socket.socket())
    free.bind(("127.0.0.1", 0))
    joining = stage.cluster.run(
        "joining", "hubring.ps.cli", "start", "--join", f"127.0.0.1:{free.getsockname()[1]}"
    )
    joining.until_said("retrying for")
    stage.happens()
    return joining


def look_for(stage: Stage, listening: socket.socket) -> Program:
    return stage.seeker(f"127.0.0.1:{listening.getsockname()[1]}")


NO_ANSWER = Mishap(
    "no server at the address",
    "the worker",
    who=f"no server answers at {ANY}",
    since=r"after \d+ s",
    why="no process listens on that port",
    fix=CHECK,
    code=69,
    provoke=no_listener,
)

NO_ADDRESS = Mishap(
    "an address without a port",
    "the worker",
    who="address 'localhost'",
    why="expected HOST:PORT",
    fix=r"as in 127\.0\.0\.1:5555",
    code=78,
    provoke=no_port,
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
        an_unknown_host,
        who="no server answers at no-such-host",
        why="cannot resolve the host name 'no-such-host.invalid'",
    ),
    NO_ADDRESS,
    NO_ADDRESS.but("a URL for an address", a_url, who=r"address 'https://127\.0\.0\.1:5555'"),
    Mishap(
        "`ps-server status` without a server",
        "`ps-server status`",
        who=f"no server answers at {ANY}",
        why="no process listens on that port",
        fix="check the address, or start one: ps-server start",
        code=69,
        provoke=status_without_server,
    ),
    Mishap(
        "`ps-server start --join` without a server",
        "the joining host",
        who=f"no server answers at {ANY}",
        since="for 10 s",
        why="no process listens on that port",
        fix="check the address, or start the server first",
        code=69,
        provoke=join_without_server,
    ),
]
