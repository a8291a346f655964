"""Opens gRPC channels."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from hubring.ps.security.access import NO_ACCESS, Access
from hubring.ps.security.bearer import AsyncBearer, Bearer
from hubring.ps.security.certificate import NAME, Identity

Options = Sequence[tuple[str, int]]

_ALWAYS = (("grpc.enable_http_proxy", 0),)
"""Servers and shards are on the job's network. A proxy configured for the web would block them."""

STRANGERS = (
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
)
"""A server's options against idle connections. Members keep a call open, so theirs are never idle."""

_PINNED = (("grpc.ssl_target_name_override", NAME),)


def open_channel(address: str, access: Access = NO_ACCESS, options: Options = ()) -> grpc.Channel:
    """Returns a channel for threads. It connects on first use."""
    every = [*_ALWAYS, *options]
    if access.certificate:
        channel = grpc.secure_channel(address, _trust(access), options=[*every, *_PINNED])
    else:
        channel = grpc.insecure_channel(address, options=every)
    return grpc.intercept_channel(channel, Bearer(access.secret)) if access.secret else channel


def open_async_channel(address: str, access: Access = NO_ACCESS, options: Options = ()) -> grpc.aio.Channel:
    """Returns a channel for the running event loop. It connects on first use."""
    every = [*_ALWAYS, *options]
    interceptors = [AsyncBearer(access.secret)] if access.secret else []
    if access.certificate:
        return grpc.aio.secure_channel(
            address, _trust(access), options=[*every, *_PINNED], interceptors=interceptors
        )
    return grpc.aio.insecure_channel(address, options=every, interceptors=interceptors)


def _trust(access: Access) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(root_certificates=access.certificate)


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Returns what a server needs to encrypt."""
    return grpc.ssl_server_credentials([(identity.key, identity.certificate)])
