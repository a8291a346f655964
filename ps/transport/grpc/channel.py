"""How gRPC channels are opened here."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

Options = Sequence[tuple[str, int]]

_ALWAYS = (("grpc.enable_http_proxy", 0),)
"""Servers and shards are on the network of the job; a proxy that is set for the web would cut them off."""


def open_channel(address: str, options: Options = ()) -> grpc.Channel:
    """A channel for threads; connects once it is used."""
    return grpc.insecure_channel(address, options=[*_ALWAYS, *options])


def open_async_channel(address: str, options: Options = ()) -> grpc.aio.Channel:
    """A channel for the running event loop; connects once it is used."""
    return grpc.aio.insecure_channel(address, options=[*_ALWAYS, *options])
