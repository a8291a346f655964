"""A served page of a fake hub that a test controls."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hubring.ps.config.server import ServerConfig
from hubring.ps.page.site import StatusPage
from tests.support.pages.status_hub import StatusHub, shard, worker

LIMIT = 60.0

EVERY_STATE: dict[str, Any] = {
    "workers": [
        worker(0, step=412, loss=0.3841),
        worker(1, step=412, loss=0.3902, seconds_waiting=4.2),
        worker(2, step=411, loss=0.4011, seconds_since_heartbeat=3.1),
        worker(7, step=412, loss=0.3777),
    ],
    "world_size": 9,
    "step": 411,
    "seconds_up": 754.0,
    "checkpoints": 3,
    "ended": {
        "finished": [3],
        "preempted": [4],
        "failed": {"5": "RuntimeError: out of memory in layer4.1.conv2"},
        "lost": {"6": "silent for 5.3 s at step 301"},
    },
    "slowest": "rank 2 (node1 pid 1002) at step 411",
}


class ServedPage:
    """The page and its hub, in a thread of this process."""

    def __init__(self, hub: StatusHub, *, public: bool) -> None:
        self.hub = hub
        self._public = public
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._site = self._do(self._open())
        self.address = self._site.address
        self.link = self._site.banner()[0].split()[1]
        """The page's address with the token."""

    def close(self) -> None:
        """Ends the page as the server does."""
        if not self._loop.is_closed():
            self._do(self._site.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT)
            self._loop.close()

    async def _open(self) -> StatusPage:
        site = StatusPage(ServerConfig(port=0, page_public=self._public), terminal=True)
        await site.serve(self.hub.coordinator, self.hub.reporter)
        return site

    def _do(self, story: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(story, self._loop).result(LIMIT)


@contextmanager
def served_page(
    count: int = 4, shards: int = 2, *, public: bool = True, **changes: Any
) -> Iterator[ServedPage]:
    """Serves a page for the duration of the test."""
    hub = StatusHub(count, shards)
    hub.told |= {"shards_wanted": shards, **changes}
    hub.rows = [
        shard(index, bytes_in=48_300_000 + 9_000_000 * index, held_seconds=held(len(hub.told["workers"])))
        for index in range(shards)
    ]
    page = ServedPage(hub, public=public)
    log = logging.getLogger("hubring.ps.job.job")
    log.setLevel(logging.INFO)
    log.info("rank 0 (node1 pid 1000) joined")
    log.warning(
        "rank 6 (node1 pid 1006) sent no heartbeat for 5.3 s (it was killed, suspended or disconnected)"
    )
    log.error("checkpoint failed: the disk of node0 is full")
    try:
        yield page
    finally:
        page.close()
        log.setLevel(logging.NOTSET)


def held(workers: int) -> dict[str, float]:
    return {str(rank): 1.5 + rank % 5 for rank in range(workers)}
