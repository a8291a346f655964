"""gRPC: the wire that works wherever HTTP/2 does, and the baseline for the others.

One stream per worker and shard carries data.proto's Frames; any client made from
the .proto can speak it. gRPC brings its own threads, so both ends hand messages
from those to the owner's thread by a queue and a bell.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from ps.errors import ConfigError, ConnectionLost, ServerUnreachable
from ps.transport.base import Envelope, Message, ReturnPath
from ps.transport.bell import Bell
from ps.transport.frame import Assembly, MalformedFrame, read_header, to_frames
from ps.transport.host import bracketed, numeric, reachable
from ps.transport.memory import plain_memory

log = logging.getLogger(__name__)

MAX_STREAMS = 1024
"""Workers that one listener can serve, control calls included: each takes a thread while it is open."""

_SERVICE, _METHOD = "hubring.v1.Data", "Exchange"
_PATH = f"/{_SERVICE}/{_METHOD}"
_GREETING = ("hubring-data", "1")
"""Sent as a stream opens: a client that sees it knows who answers."""

_BOTH_ENDS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_CLIENT = [
    *_BOTH_ENDS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each connection its own socket, and no backoff of another's
]
_SERVER = [
    *_BOTH_ENDS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


class GrpcTransport:
    """gRPC channels and servers.

    Args:
        register: Each adds a service to the servers that `listen` starts, as
            `add_..._to_server` does; so a shard's control shares the data's port.
    """

    name = "grpc"

    def __init__(self, register: Sequence[Callable[[grpc.Server], None]] = ()) -> None:
        self._register = register

    def listen(self, host: str) -> GrpcListener:
        return GrpcListener(host, self._register)

    def dial(self, address: str, timeout: float) -> GrpcConnection:
        connection = GrpcConnection(address)
        try:
            connection.await_greeting(timeout)
        except ServerUnreachable:
            connection.close()
            raise
        return connection

    def allocate(self, nbytes: int) -> memoryview:
        return plain_memory(nbytes)

    def window(self, nbytes: int) -> memoryview:
        return self.allocate(nbytes)


class GrpcConnection:
    """A worker's end: one channel, one stream. A thread of its own reads the replies."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lost = ""
        self._inbox: deque[Message] = deque()
        self._outbox: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self._rooms: dict[int, memoryview] = {}
        self._bell = Bell()
        self._opened = threading.Event()
        self._channel = grpc.insecure_channel(address, options=_CLIENT)
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(_PATH)
        self._call = exchange(_each_frame(self._outbox))
        self._reader = threading.Thread(target=self._read, name=f"grpc {address}", daemon=True)
        self._reader.start()

    @property
    def waitable(self) -> int:
        return self._bell.waitable

    def await_greeting(self, timeout: float) -> None:
        """Returns once a listener of ours has answered.

        Raises:
            ServerUnreachable: None has within `timeout` seconds, or something else did.
        """
        if not self._opened.wait(timeout):
            raise ServerUnreachable(f"nothing at {self._address} answered as a shard within {timeout:g} s")
        if self._lost:
            raise ServerUnreachable(f"no shard answers at {self._address} ({self._lost})")

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if self._lost:
            raise self._loss()
        if into is not None:
            request, _ = read_header(message.header)
            self._rooms[request] = into
        self._outbox.put(to_frames(message))

    def flush(self) -> None:
        """Nothing is held back."""

    def receive(self) -> list[Message]:
        self._bell.clear()
        lost = self._lost  # before the inbox: nothing is put there once it is set
        messages = [self._inbox.popleft() for _ in range(len(self._inbox))]
        if lost:
            self._bell.ring()
            if not messages:
                raise self._loss()
        return messages

    def _loss(self) -> ConnectionLost:
        return ConnectionLost(f"the stream to {self._address} broke off ({self._lost}); dial again")

    def _read(self) -> None:
        """The reader's thread."""
        try:
            if _GREETING in self._call.initial_metadata():
                self._opened.set()
            assembly = Assembly(self._find_room)
            for frame in self._call:
                message = assembly.add(frame)
                if message is not None:
                    self._inbox.append(message)
                    self._bell.ring()
            self._lost = "the shard closed it"
        except grpc.RpcError:
            self._lost = f"{self._call.code().name}: {self._call.details()}"
        except MalformedFrame as error:
            self._lost = str(error)
        finally:
            self._opened.set()
            self._bell.ring()

    def _find_room(self, request: int, nbytes: int) -> memoryview | None:
        into = self._rooms.pop(request, None)
        return into[:nbytes] if into is not None and nbytes <= into.nbytes else None

    def close(self) -> None:
        self._outbox.put(None)
        self._call.cancel()
        self._reader.join()
        self._channel.close()
        self._bell.close()


class _Stream:
    """A worker's stream as the listener knows it. It ends when its requests have, and all are answered."""

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self.fault = ""
        self._lock = threading.Lock()
        self._open = 1  # the requests to come count as one

    def begin(self) -> None:
        """A request came."""
        with self._lock:
            self._open += 1

    def finish(self) -> None:
        """A request was answered, or no more will come."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self.end()

    def end(self) -> None:
        """Lets the stream go."""
        self.outbox.put(None)


class GrpcListener:
    """A shard's end. Each stream has two threads: gRPC's sends the replies, ours reads the requests."""

    def __init__(self, host: str, register: Sequence[Callable[[grpc.Server], None]]) -> None:
        here = numeric(host)
        self._inbox: deque[Envelope] = deque()
        self._bell = Bell()
        self._streams: set[_Stream] = set()
        self._threads = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="grpc")
        self._server = grpc.server(self._threads, options=_SERVER)
        exchange: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._exchange)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: exchange}),)
        )
        for add in register:
            add(self._server)
        try:
            port = self._server.add_insecure_port(f"{bracketed(here)}:0")
        except RuntimeError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host} by gRPC ({error}); is it this machine's?") from error
        self._server.start()
        self._address = f"{bracketed(reachable(here))}:{port}"

    @property
    def address(self) -> str:
        return self._address

    @property
    def waitable(self) -> int:
        return self._bell.waitable

    def flush(self) -> None:
        """Nothing is held back."""

    def receive(self) -> list[Envelope]:
        self._bell.clear()
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        frames = to_frames(message)
        reply_to.outbox.put(frames if stable else list(frames))
        reply_to.finish()

    def _exchange(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream; runs in gRPC's thread until it ends."""
        stream = _Stream()
        context.send_initial_metadata((_GREETING,))
        if not context.add_callback(stream.end):
            return
        self._streams.add(stream)
        reader = threading.Thread(target=self._read, args=(requests, stream), name="grpc reader", daemon=True)
        reader.start()
        try:
            yield from _each_frame(stream.outbox)
        finally:
            self._streams.discard(stream)
        if stream.fault:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, stream.fault)

    def _read(self, requests: Iterator[bytes], stream: _Stream) -> None:
        """The thread that reads one stream."""
        assembly = Assembly()
        try:
            for frame in requests:
                message = assembly.add(frame)
                if message is not None:
                    stream.begin()
                    self._inbox.append(Envelope(message, stream))
                    self._bell.ring()
            stream.finish()
        except MalformedFrame as error:
            log.warning("dropped a stream: %s", error)
            stream.fault = str(error)
            stream.end()
        except grpc.RpcError as error:
            log.debug("a worker broke its stream off: %s", error)

    def close(self) -> None:
        for stream in list(self._streams):
            stream.end()
        self._server.stop(grace=1.0).wait()
        self._threads.shutdown(wait=False)
        self._bell.close()


def _each_frame(outbox: queue.SimpleQueue[Iterable[bytes] | None]) -> Iterator[bytes]:
    """All frames put in, in order, until None is."""
    for frames in iter(outbox.get, None):
        yield from frames
