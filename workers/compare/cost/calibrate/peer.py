"""The link to another host: measured between this one and one that serves."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from hubring.ps.config.address import is_loopback
from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.calibrate import partner
from hubring.workers.compare.cost.calibrate.pair import Line
from hubring.workers.compare.cost.model.constants import Wire
from hubring.workers.compare.cost.model.exchange_terms import LINE_BYTES, PAYLOAD_BYTES
from hubring.workers.compare.experiment.setting import Link

OUTRUN = 1.2
"""A link that brings a byte in less than so many times what the processors need has shown no limit."""


def serve(host: str, *, insecure: bool) -> None:
    """Serves whoever calibrates, until it is interrupted.

    Args:
        host: Address to listen on.
        insecure: Listen beyond loopback, where anybody may speak to it.

    Raises:
        UsageError: The address is reachable from elsewhere and `insecure` was not said.
        KeyboardInterrupt: It was interrupted, and all is closed.
    """
    if not (is_loopback(host) or insecure):
        raise UsageError(f"--serve {host} is reachable from other machines without credentials: --insecure")
    loop, addresses = partner.open_shard(host)
    # Not by an exception, which may come where it is dropped, or amid what must be closed.
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    print(f"on another host: ps-compare calibrate --peer {addresses['zmq']}", file=sys.stderr)
    loop.run()
    raise KeyboardInterrupt


@contextmanager
def line_to(address: str) -> Iterator[Line]:
    """A line to a host that serves.

    Raises:
        ServerUnreachable: Nothing answers there.
    """
    line = Line("zmq", address)
    try:
        yield line
    finally:
        line.close()


def link_of(wire: Wire, alphas: list[float], betas: list[float]) -> Link:
    """What lies between, given what the same wire takes without a link.

    Args:
        wire: Within this host.
        alphas: Seconds of a small message to the other host.
        betas: Seconds a byte each way.
    """
    beta = median(betas)
    rate = 8 / beta * LINE_BYTES / PAYLOAD_BYTES if beta > OUTRUN * wire.beta else None
    return Link(rate=rate, latency=max(0.0, median(alphas) - wire.alpha))
