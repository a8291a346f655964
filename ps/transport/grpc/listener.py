"""A shard's end of the gRPC transport: a server whose streams share one inbox.

Law: a stream has a place while it is open. The places are bounded, in total and for each address, because
each stream costs two threads. Once the places are taken, a stream that sent nothing within SILENT_SECONDS
gives its place to a new one, the oldest first. Before that, silence is no fault: a worker may connect long
before it pushes, and one of its streams may never be needed. A stream that finds no place is refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from hubring.ps.core import bounds
from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import ConfigError
from hubring.ps.security.access import ShardLock
from hubring.ps.security.guard import ThreadGuard, in_threads
from hubring.ps.transport.base import DamagedHeader, Envelope, Message, ReturnPath
from hubring.ps.transport.grpc.channel import STRANGERS, server_credentials
from hubring.ps.transport.grpc.frame import Assembly, MalformedFrame, to_frames
from hubring.ps.transport.grpc.newcomers import AdmittedCalls, GrpcNewcomers
from hubring.ps.transport.host import bracketed, numeric, reachable
from hubring.ps.transport.outbox import Backlog, Outbox, weigh
from hubring.ps.transport.polling import Bell

log = logging.getLogger(__name__)

MAX_STREAMS = 768
"""Maximum number of open streams of one listener."""

ADDRESS_STREAMS = 256
"""Maximum number of open streams of one IP address: 128 workers on one host, with two streams each."""

SILENT_SECONDS = 10.0
"""How long a stream keeps its place without a message if all places are taken."""


class OpenStream:
    """A worker's stream. It ends when all requests have been received and answered.

    Args:
        peer: The peer as gRPC names it: `ipv4:ADDRESS:PORT` or `ipv6:[ADDRESS]:PORT`.
        since: When the stream was opened, in monotonic seconds.
        checked: Whether its payloads have checksums.

    Attributes:
        address: The peer's IP address.
        silent: Whether the stream has sent no message yet.
    """

    def __init__(self, peer: str, since: float, checked: bool = True) -> None:
        self.peer, self.since, self.checked = peer, since, checked
        self.address = peer.rpartition(":")[0]
        self.silent = True
        self.backlog = Backlog()
        self.fault = ""
        self._outbox: Outbox[tuple[Iterable[bytes], int]] = Outbox()
        self._lock = threading.Lock()
        self._open = 1  # future requests count as one

    def begin(self, message: Message) -> None:
        """Records a request that waits to be processed."""
        self.backlog.add(weigh(message))
        with self._lock:
            self._open += 1

    def answer(self, message: Message, stable: bool) -> None:
        """Queues a reply. A payload that may change is framed, and thereby copied, now."""
        frames, nbytes = to_frames(message, self.checked), weigh(message)
        self.backlog.add(nbytes)
        self._outbox.put((frames if stable else list(frames), nbytes), message.priority)
        self.finish()

    def finish(self) -> None:
        """Records that a request was answered, or that no more will come."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self.end()

    def frames(self) -> Iterator[bytes]:
        """Yields the frames of all replies. Each is made when gRPC is ready to send it."""
        for frames, nbytes in self._outbox:
            yield from frames
            self.backlog.remove(nbytes)

    def end(self) -> None:
        """Ends the stream. Never blocks."""
        self._outbox.close()
        self.backlog.close()


class OpenStreams:
    """The places of one listener. Any thread may call it.

    Args:
        rejections: Counts refused and silent streams.
    """

    def __init__(self, rejections: Rejections) -> None:
        self._rejections = rejections
        self._lock = threading.Lock()
        self._places: dict[OpenStream, None] = {}
        """In the order in which they were taken."""

    def take(self, stream: OpenStream) -> bool:
        """Gives a new stream a place; returns False if all are taken."""
        with self._lock:
            if rivals := self._rivals(stream):
                silent = (one for one in rivals if one.silent and stream.since - one.since > SILENT_SECONDS)
                oldest = next(silent, None)
                if oldest is None:
                    text = f"refused a stream of {stream.peer}: all places are taken"
                    self._rejections.add("streams", log, text)
                    return False
                del self._places[oldest]
                text = (
                    f"closed a stream of {oldest.address} that sent nothing, to make room for {stream.peer}"
                )
                self._rejections.add("silent stream", log, text)
                oldest.end()
            self._places[stream] = None
        return True

    def _rivals(self, stream: OpenStream) -> list[OpenStream]:
        """Returns the streams of which one must end before this one has a place, oldest first."""
        same = [other for other in self._places if other.address == stream.address]
        if len(same) >= ADDRESS_STREAMS:
            return same
        return list(self._places) if len(self._places) >= MAX_STREAMS else []

    def leave(self, stream: OpenStream) -> None:
        """Frees the place of a stream that ended."""
        with self._lock:
            self._places.pop(stream, None)

    def end(self) -> None:
        """Ends all streams."""
        with self._lock:
            for stream in self._places:
                stream.end()


CONTROL_THREADS = 32
"""Threads for control calls. Streams have threads of their own."""

MAX_CONNECTIONS = MAX_STREAMS + 64
"""Maximum number of TCP connections of one listener. A stream has a connection of its own. The coordinator
uses one of the others.

A connection costs some 57 kB, even if it never completes a TLS handshake: 47 MB if strangers take all.

A listener takes at most a quarter of the process's descriptors for them.
"""

CONNECTION_CALLS = 64
"""Maximum number of open streams and calls of one TCP connection."""

MAX_CONTROL_BYTES = 8 << 20
"""Maximum bytes of a control message: buckets and slices of a plan, 4 MiB each. `Assembly` bounds frames."""

SERVICE, METHOD = "hubring.v1.Data", "Exchange"
GREETING = ("hubring-data", "1")
"""Initial metadata of each stream. It shows a client that the server is a shard."""

READ_AHEAD = 256 << 10
"""Bytes of each stream that gRPC receives ahead. A window that grows by itself lets a sender fill memory."""

BOTH_ENDS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Channel options of both ends. None of them is for speed, since none helps.

In frames of 1 MiB, 100 MB there and back took 118 ms with gRPC's defaults. It took as long, within 10 ms,
with HTTP/2 frames of 4 or 16 MB, a lookahead or a write buffer of 8 MB, TCP reads of 64 KB or 1 MB, a receive
buffer of 4 MB, `optimization_target=throughput` and zero-copy sends. Without `bdp_probe`, which lets the
window grow, it took 139 ms with gRPC's 64 KiB ahead. With READ_AHEAD no difference was measured on one host.
"""
_SERVER = (
    *BOTH_ENDS,
    ("grpc.max_receive_message_length", MAX_CONTROL_BYTES),
    ("grpc.max_concurrent_streams", CONNECTION_CALLS),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", READ_AHEAD),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    *STRANGERS,
)


class GrpcListener:
    """A shard's end. Each stream has two threads: gRPC's thread sends replies, ours reads requests.

    Args:
        place: The address to listen on, or the path of a unix socket, to which only members must come.
        register: Each adds a service to the server.
        rejections: Counts refused frames and streams.
        lock: Guards the server; None: it is open.
    """

    def __init__(
        self,
        place: str,
        register: Sequence[Callable[[grpc.Server], None]],
        rejections: Rejections,
        lock: ShardLock | None = None,
    ) -> None:
        on_host = place.startswith("/")
        here = place if on_host else numeric(place)
        self._checked = not on_host
        self._inbox: deque[Envelope] = deque()
        self._bell = Bell()
        self.waitable = self._bell.waitable
        self._rejections = rejections
        self._streams = OpenStreams(rejections)
        self._newcomers = GrpcNewcomers(rejections)
        self._stream_threads = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="grpc stream")
        self._control_threads = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="grpc control")
        guards: list[grpc.ServerInterceptor] = [] if lock is None else [ThreadGuard(lock.guard, rejections)]
        if lock is not None and lock.identity is not None:  # otherwise nothing forgets the connections
            guards.append(AdmittedCalls(self._newcomers))
        self._server = grpc.server(
            self._control_threads,
            interceptors=guards,
            options=(
                *_SERVER,
                ("grpc.max_allowed_incoming_connections", bounds.descriptor_share(MAX_CONNECTIONS, 4)),
            ),
        )
        exchange: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            in_threads(self._exchange, self._stream_threads)
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: exchange}),)
        )
        for add in register:
            add(self._server)
        try:
            wanted = f"unix:{place}" if on_host else f"{bracketed(here)}:0"
            if lock is not None and lock.identity is not None:
                credentials = server_credentials(lock.identity, lock.guard, lock.authority)
                port = self._server.add_secure_port(wanted, credentials)
                self._newcomers.begin(port)
            else:
                port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {place} with gRPC ({error}); use an address of this host"
            ) from error
        self._server.start()
        self.address = wanted if on_host else f"{bracketed(reachable(here))}:{port}"

    def flush(self) -> None:
        """Does nothing: `send` does not buffer."""

    def receive(self) -> list[Envelope]:
        self._bell.clear()
        envelopes = [self._inbox.popleft() for _ in range(len(self._inbox))]
        for envelope in envelopes:
            envelope.reply_to.backlog.remove(weigh(envelope.message))
        return envelopes

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        reply_to.answer(message, stable)

    def _exchange(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serves one stream. Runs in gRPC's thread until the stream ends."""
        stream = OpenStream(context.peer(), time.monotonic(), self._checked)
        if not self._streams.take(stream):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are open; close some first")
        context.send_initial_metadata((GREETING,))
        try:
            if context.add_callback(stream.end):
                arguments = (requests, stream)
                threading.Thread(target=self._read, args=arguments, name="grpc reader", daemon=True).start()
                yield from stream.frames()
        finally:
            self._streams.leave(stream)
        if stream.fault:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, stream.fault)

    def _read(self, requests: Iterator[bytes], stream: OpenStream) -> None:
        """Reads one stream, in a thread of its own."""
        assembly = Assembly(checked=self._checked)
        try:
            for frame in requests:
                message = assembly.add(frame)
                if message is not None:
                    stream.silent = False
                    self._deliver(message, stream)
                    stream.backlog.await_room()
            stream.finish()
        except (DamagedHeader, MalformedFrame) as error:
            self._rejections.add("frame", log, f"closed a stream of {stream.address}: {error}")
            stream.fault = str(error)
            if isinstance(error, DamagedHeader):
                self._deliver(Message(b"", damage=stream.fault), stream)
            stream.end()
        except grpc.RpcError as error:
            log.debug("a worker cancelled its stream: %s", error)

    def _deliver(self, message: Message, stream: OpenStream) -> None:
        stream.begin(message)
        self._inbox.append(Envelope(message, stream))
        self._bell.ring()

    def close(self) -> None:
        self._newcomers.close()
        self._streams.end()
        self._server.stop(grace=1.0).wait()
        self._stream_threads.shutdown(wait=False)
        self._control_threads.shutdown(wait=False)
        self._bell.close()
