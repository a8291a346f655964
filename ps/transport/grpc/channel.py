"""Opens gRPC channels."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

Options = Sequence[tuple[str, int]]

_ALWAYS = (("grpc.enable_http_proxy", 0),)
"""Servers and shards are on the job's network. A proxy configured for the web would block them."""


def open_channel(address: str, options: Options = ()) -> grpc.Channel:
    """Returns a channel for threads. It connects on first use."""
    return grpc.insecure_channel(address, options=[*_ALWAYS, *options])


def open_async_channel(address: str, options: Options = ()) -> grpc.aio.Channel:
    """Returns a channel for the running event loop. It connects on first use."""
    return grpc.aio.insecure_channel(address, options=[*_ALWAYS, *options])
