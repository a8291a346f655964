"""Measures the link to another host, which serves."""

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
from hubring.workers.compare.cost.model.constants import LINE_BYTES, PAYLOAD_BYTES, Wire
from hubring.workers.compare.experiment.setting import Link

OUTRUN = 1.2
"""A link is limited by processors, not by its rate, below this ratio of its time per byte to theirs."""


def serve(host: str, *, insecure: bool) -> None:
    """Serves hosts that calibrate, until it is interrupted.

    Args:
        host: Address to listen on.
        insecure: Allow to listen beyond loopback, where any machine can connect.

    Raises:
        UsageError: The address is not loopback and `insecure` is not set.
        KeyboardInterrupt: It was interrupted; everything is closed.
    """
    if not (is_loopback(host) or insecure):
        raise UsageError(f"--serve {host} is open to other machines without credentials; add --insecure")
    loop, addresses = partner.open_shard(host)
    # Not an exception, which could be lost or could interrupt closing.
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    print(f"on the other host, run: ps-compare calibrate --peer {addresses['zmq']}", file=sys.stderr)
    loop.run()
    raise KeyboardInterrupt


@contextmanager
def line_to(address: str) -> Iterator[Line]:
    """Provides a connection to a host that serves.

    Raises:
        ServerUnreachable: No server answers at the address.
    """
    line = Line("zmq", address)
    try:
        yield line
    finally:
        line.close()


def link_of(wire: Wire, alphas: list[float], betas: list[float]) -> Link:
    """Returns the link between two hosts, given the same wire without a link.

    Args:
        wire: The wire within this host.
        alphas: Seconds of a small message to the other host.
        betas: Seconds a byte each way.
    """
    beta = median(betas)
    rate = 8 / beta * LINE_BYTES / PAYLOAD_BYTES if beta > OUTRUN * wire.beta else None
    return Link(rate=rate, latency=max(0.0, median(alphas) - wire.alpha))
