"""A hub's links can be followed with the eye: each ends at its worker and its shard, and meets no other."""

from __future__ import annotations

import itertools
import math

import pytest

from hubring.ps.page.picture_layout import ARC, RIM, SIDE, on_arc, shard_boxes, worker_radius


@pytest.mark.parametrize(("workers", "clear"), [(1, 1.0), (2, 1.0), (5, 1.0), (12, 1.0), (64, 0.7)])
@pytest.mark.parametrize("shards", [1, 2, 4, 12])
def test_no_link_crosses_another_worker_or_shard(workers: int, clear: float, shards: int) -> None:
    boxes, radius = shard_boxes(shards), worker_radius(workers, ARC)
    assert all(box.x >= 0 and box.x + box.width <= SIDE and box.y + box.height <= SIDE for box in boxes)
    places = [on_arc(index, workers, RIM) for index in range(workers)]
    assert all(place.y + radius < boxes[0].y for place in places)
    for here, other in itertools.permutations(places, 2):
        for end in (box.top for box in boxes):
            link, away = (end.x - here.x, end.y - here.y), (other.x - here.x, other.y - here.y)
            beside = abs(link[0] * away[1] - link[1] * away[0]) / math.hypot(*link)
            ahead = link[0] * away[0] + link[1] * away[1] > 0
            assert not ahead or beside > clear * radius, (here, other, end)
