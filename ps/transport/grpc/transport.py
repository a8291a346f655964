"""The gRPC transport: works wherever HTTP/2 does, and is the baseline for the others.

Streams carry data.proto's Frames. Any client generated from the .proto can use them. gRPC has its own
threads, so both ends pass messages to the owner's thread with a queue and a bell.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import grpc

from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import ConnectionLost, ServerUnreachable
from hubring.ps.security.access import NO_KEY_NEEDED, ShardKey, ShardLock
from hubring.ps.transport.base import DamagedHeader, Message
from hubring.ps.transport.grpc.calls import describe
from hubring.ps.transport.grpc.channel import open_channel
from hubring.ps.transport.grpc.frame import MAX_FRAME, Assembly, MalformedFrame, read_header, to_frames
from hubring.ps.transport.grpc.listener import BOTH_ENDS, GREETING, METHOD, SERVICE, GrpcListener
from hubring.ps.transport.mapping import Arena, plain_memory
from hubring.ps.transport.outbox import Backlog, Outbox, weigh
from hubring.ps.transport.polling import Bell
from hubring.ps.transport.window import Window, Windows

LANES = 2 if len(os.sched_getaffinity(0)) > 2 else 1
"""Streams of one connection, each on its own TCP connection.

One lane keeps 2 cores busy. There 100 MB there and back took 114 to 122 ms with one lane, 115 to 119 with two
and 121 to 135 with four. With more cores one lane is limited by its own threads, or by the bandwidth that a
network grants one TCP connection.
"""

_CLIENT = (
    *BOTH_ENDS,
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.use_local_subchannel_pool", 1),  # gives each lane its own socket and backoff
)


class GrpcTransport:
    """The gRPC transport of one process.

    Args:
        register: Each adds a service to the servers that `listen` starts, like `add_..._to_server`. A shard's
            control thus shares the data port.
        lanes: Streams of each connection that `dial` opens.
        lock: Guards the listeners; None: they are open.
        rejections: Counts what a listener refuses.
    """

    name = "grpc"

    def __init__(
        self,
        register: Sequence[Callable[[grpc.Server], None]] = (),
        lanes: int = LANES,
        rejections: Rejections | None = None,
        lock: ShardLock | None = None,
    ) -> None:
        self._register = register
        self._lock = lock
        self._rejections = rejections or Rejections()
        self._lanes = lanes
        self._windows = Windows(Arena())

    def listen(self, place: str) -> GrpcListener:
        return GrpcListener(place, self._register, self._rejections, self._lock)

    def dial(self, address: str, timeout: float, key: ShardKey = NO_KEY_NEEDED) -> GrpcConnection:
        connection = GrpcConnection(address, self._lanes, key)
        try:
            connection.await_greeting(timeout)
        except ServerUnreachable:
            connection.close()
            raise
        return connection

    def allocate(self, nbytes: int) -> memoryview:
        return plain_memory(nbytes)

    def window(self, nbytes: int) -> Window:
        return self._windows.allocate(nbytes, populate=True)


class GrpcConnection:
    """A worker's end: a few lanes that share the waiting requests. A reply uses its request's lane.

    Waiting requests reference the caller's memory. gRPC's flow control asks for frames one by one.
    Replies without a landing place wait in the backlog, up to its bound.
    """

    def __init__(self, address: str, lanes: int, key: ShardKey) -> None:
        self._address = address
        self.checked = not address.startswith("unix:")
        """Whether payloads have checksums."""
        self._ends: list[str] = []  # why each lane ended
        self._inbox: deque[Message] = deque()
        self._backlog = Backlog()
        self._outbox: Outbox[Iterator[bytes]] = Outbox()
        self._rooms: dict[int, memoryview] = {}
        self._bell = Bell()
        self.waitable = self._bell.waitable
        self._lanes = [_Lane(self, address, self._outbox, key) for _ in range(lanes)]
        for lane in self._lanes:
            lane.start()

    def await_greeting(self, timeout: float) -> None:
        """Returns once a shard's listener has answered on every lane.

        Raises:
            ServerUnreachable: No listener answered within `timeout` seconds, or another server did.
        """
        deadline = time.monotonic() + timeout
        for lane in self._lanes:
            if not lane.opened.wait(max(0.0, deadline - time.monotonic())):
                raise ServerUnreachable(f"no shard answered at {self._address} within {timeout:g} s")
        if self._ends:
            raise ServerUnreachable(f"no shard answers at {self._address} ({self._ends[0]})")

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if self._ends:
            raise self._loss()
        if into is not None:
            request, _ = read_header(message.header)
            self._rooms[request] = into
        self._outbox.put(to_frames(message, self.checked), message.priority)

    def flush(self) -> None:
        """Does nothing: `send` does not buffer."""

    def receive(self) -> list[Message]:
        self._bell.clear()
        # Read before the inbox: no message arrives after all lanes have ended.
        lost = len(self._ends) == len(self._lanes)
        messages = [self._inbox.popleft() for _ in range(len(self._inbox))]
        self._backlog.remove(sum(weigh(message) for message in messages if not message.landed))
        if lost:
            self._bell.ring()
            if not messages:
                raise self._loss()
        return messages

    def _loss(self) -> ConnectionLost:
        return ConnectionLost(f"{self._address}: connection lost ({self._ends[0]})")

    # Methods that lanes call, each in its own thread.

    def find_room(self, request: int, nbytes: int) -> memoryview | None:
        """Returns the memory in which a reply's payload should land."""
        into = self._rooms.pop(request, None)
        return into[:nbytes] if into is not None and nbytes <= into.nbytes else None

    def deliver(self, message: Message) -> None:
        """Takes a complete reply. Returns when more may be read."""
        if not message.landed:
            self._backlog.add(weigh(message))
        self._inbox.append(message)
        self._bell.ring()
        self._backlog.await_room()

    def end(self, why: str, broken: bool) -> None:
        """Ends the connection after a lane has ended. The other lanes finish first, unless this one broke."""
        self._ends.append(why)
        self._outbox.close()
        if broken:
            for lane in self._lanes:
                lane.cancel()
        self._bell.ring()

    def close(self) -> None:
        self._outbox.close()
        self._backlog.close()
        for lane in self._lanes:
            lane.cancel()
        for lane in self._lanes:
            lane.close()
        self._bell.close()


class _Lane:
    """One channel, its stream, and the thread that reads it."""

    def __init__(
        self, connection: GrpcConnection, address: str, outbox: Outbox[Iterator[bytes]], key: ShardKey
    ) -> None:
        self.opened = threading.Event()
        """Set once a shard's listener has answered, or the lane has ended."""
        self._connection = connection
        self._channel = open_channel(address, key.access, _CLIENT)
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes]
        exchange = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = exchange(frame for frames in outbox for frame in frames)
        self._reader = threading.Thread(target=self._read, name=f"grpc {address}", daemon=True)

    def start(self) -> None:
        self._reader.start()

    def _read(self) -> None:
        """Runs in the reader thread."""
        why, broken = "the shard closed the stream", False
        try:
            if GREETING in self._call.initial_metadata():
                self.opened.set()
            assembly = Assembly(self._connection.find_room, self._connection.checked)
            for frame in self._call:
                message = assembly.add(frame)
                if message is not None:
                    self._connection.deliver(message)
        except grpc.RpcError as error:
            why, broken = describe(error), True
        except (DamagedHeader, MalformedFrame) as error:
            why, broken = str(error), True
        finally:
            self._connection.end(why, broken)
            self.opened.set()

    def cancel(self) -> None:
        """Cancels the stream. Its thread ends soon."""
        self._call.cancel()

    def close(self) -> None:
        """Waits for the thread and closes the channel. Call `cancel` first."""
        self._reader.join()
        self._channel.close()
