"""Both ends of a control port: how channels are opened, and what a server grants its callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from hubring.ps.core import bounds
from hubring.ps.security.access import NO_ACCESS, Access
from hubring.ps.security.certificate import Identity, secret_authority, secret_certificate
from hubring.ps.security.guard import AsyncBearer, Bearer, Guard
from hubring.ps.transport.grpc.newcomers import HANDSHAKE_MS, MOST

Options = Sequence[tuple[str, int]]

_ALWAYS = (("grpc.enable_http_proxy", 0),)
"""Servers and shards are on the job's network. A proxy configured for the web would block them."""

STRANGERS = (
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
)
"""A server's options against connections that do not end their handshake, and long headers.

An idle connection stays: the coordinator could not replace its own to a shard that strangers crowd.
"""

FAST_REDIAL = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
"""Options of a channel to a coordinator, whose standby may take over within some tenths of a second."""


def open_channel(address: str, access: Access = NO_ACCESS, options: Options = ()) -> grpc.Channel:
    """Returns a channel for threads. It connects on first use."""
    every = [*_ALWAYS, *options]
    if access.unix:
        channel = grpc.insecure_channel(f"unix:{access.unix}", options=every)
    elif access.certificate:
        channel = grpc.secure_channel(address, _trust(access), options=[*every, _expects(access)])
    else:
        channel = grpc.insecure_channel(address, options=every)
    return grpc.intercept_channel(channel, Bearer(access.secret)) if access.secret else channel


def open_async_channel(address: str, access: Access = NO_ACCESS, options: Options = ()) -> grpc.aio.Channel:
    """Returns a channel for the running event loop. It connects on first use."""
    every = [*_ALWAYS, *options]
    interceptors = [AsyncBearer(access.secret)] if access.secret else []
    if access.certificate:
        return grpc.aio.secure_channel(
            address, _trust(access), options=[*every, _expects(access)], interceptors=interceptors
        )
    return grpc.aio.insecure_channel(address, options=every, interceptors=interceptors)


def _trust(access: Access) -> grpc.ChannelCredentials:
    identity = access.identity or secret_certificate(access.secret)
    return grpc.ssl_channel_credentials(access.certificate, identity.key, identity.certificate)


def _expects(access: Access) -> tuple[str, str]:
    return "grpc.ssl_target_name_override", access.name  # an address may have other names


def server_credentials(identity: Identity, guard: Guard, authority: bytes = b"") -> grpc.ServerCredentials:
    """Returns what a server needs to encrypt, and to let in only those that prove themselves first.

    Args:
        identity: What the server shows.
        guard: Knows the secrets that prove a client, which a rotation may change.
        authority: Whose certificates prove one instead, as PEM; empty for none.
    """
    pair = identity.key, identity.certificate
    if authority:
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=True)
    trusted = guard.known

    def configuration() -> Any:
        roots = b"".join(map(secret_authority, trusted))
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def changed() -> Any:  # asked before each handshake
        nonlocal trusted
        if trusted is guard.known:
            return None
        trusted = guard.known
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), changed, require_client_authentication=True)


SPARE_CONNECTIONS = 2 * MOST
"""Connections of command lines and probes, and of strangers between two looks at them: 57 kB each."""

CONTROL_CALLS = 32
"""Maximum number of open calls of one connection. A refused one takes 21 kB until its caller has read why.

A worker has about six: its open call, a heartbeat and its repetition, one call of training, two of torch.
gRPC counts a call for some time after its end, and fails calls with UNAVAILABLE from half of the maximum on.
"""


def control_options(members: int) -> list[tuple[str, int]]:
    """Returns the options of the control port's gRPC server, to which so many processes of a job connect."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", 4 << 20),
        (
            "grpc.max_allowed_incoming_connections",
            bounds.descriptor_share(members + SPARE_CONNECTIONS, 3),
        ),
        ("grpc.max_concurrent_streams", CONTROL_CALLS),
        *STRANGERS,
    ]
