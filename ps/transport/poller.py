"""A poller: tells which of some descriptors can be read, until each of them was."""

from __future__ import annotations

import select


def poller(*descriptors: int) -> select.epoll:
    """An epoll of these; whoever made it closes it, and may register more."""
    epoll = select.epoll()
    for descriptor in descriptors:
        epoll.register(descriptor, select.EPOLLIN)
    return epoll
