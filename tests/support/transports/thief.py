"""Who takes the ports of a process that is gone, and writes down what its clients send."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import zmq

T = TypeVar("T")

FREE_SECONDS = 30.0
"""How long a port may stay taken."""


@contextmanager
def zmq_thief(ports: Iterable[int], answer: bytes | None) -> Iterator[list[list[bytes]]]:
    """Listens on ports of loopback with ZeroMQ, lets everybody in, and gives the messages that come.

    Args:
        ports: The ports, which may not be free yet.
        answer: Sent for each message; None: nothing is sent.
    """
    heard: list[list[bytes]] = []
    over = threading.Event()
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        doorkeeper = stack.enter_context(context.socket(zmq.REP))
        doorkeeper.bind("inproc://zeromq.zap.01")
        routers = [_router(stack.enter_context(context.socket(zmq.ROUTER)), port) for port in ports]

        def listen() -> None:
            while not over.is_set():
                if doorkeeper.poll(1):  # any password opens
                    version, number, *_ = doorkeeper.recv_multipart()
                    doorkeeper.send_multipart([version, number, b"200", b"OK", b"", b""])
                for router in routers:
                    if router.poll(1):
                        route, *parts = router.recv_multipart()
                        heard.append(parts)
                        if answer is not None:
                            router.send_multipart([route, answer])

        with _running(listen, over):
            yield heard


@contextmanager
def tcp_thief(ports: Iterable[int]) -> Iterator[list[bytes]]:
    """Listens on ports of loopback, and gives the first bytes of each connection. It answers nothing."""
    heard: list[bytes] = []
    over = threading.Event()
    with ExitStack() as stack:
        listeners = [stack.enter_context(_bound(port)) for port in ports]

        def listen() -> None:
            while not over.is_set():
                for listener in listeners:
                    try:
                        connection, _ = listener.accept()
                    except TimeoutError:
                        continue
                    stack.enter_context(connection).settimeout(1.0)
                    heard.append(connection.recv(1 << 16))

        with _running(listen, over):
            yield heard


def _router(router: zmq.Socket[bytes], port: int) -> zmq.Socket[bytes]:
    router.linger, router.plain_server = 0, True
    _once_free(lambda: router.bind(f"tcp://127.0.0.1:{port}"))
    return router


def _bound(port: int) -> socket.socket:
    listener = _once_free(lambda: socket.create_server(("127.0.0.1", port)))
    listener.settimeout(0.01)
    return listener


def _once_free(bind: Callable[[], T]) -> T:
    """Binds a port that may still be taken for a while."""
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        try:
            return bind()
        except (OSError, zmq.ZMQError):
            if time.monotonic() > deadline:
                raise


@contextmanager
def _running(work: Callable[[], None], over: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
