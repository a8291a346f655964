"""Polls file descriptors."""

from __future__ import annotations

import select


def poller(*descriptors: int) -> select.epoll:
    """Returns an epoll of these descriptors. The caller closes it and can register more."""
    epoll = select.epoll()
    for descriptor in descriptors:
        epoll.register(descriptor, select.EPOLLIN)
    return epoll
