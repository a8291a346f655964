"""horovod.data: loaders that read ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hubring.workers.horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0
        self.third = threading.Event()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            self.read += 1
            if number == 2:
                self.third.set()
            if number == 5:
                raise ValueError("the file is damaged")
            yield number

    def _process_batch(self, batch: int) -> int:
        return 10 * batch


class ReadAhead(AsyncDataLoaderMixin, Numbers):
    pass


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data loader")]


@pytest.mark.parametrize("most", [0, 1, 64])
def test_every_epoch_has_all_batches_in_order(most: int) -> None:
    loader = ReadAhead(most, False, 4)
    assert [list(loader) for _ in range(2)] == [[0, 10, 20, 30]] * 2 == [list(Numbers(4))] * 2
    assert len(loader) == 4
    assert readers() == []


def test_batches_are_read_before_they_are_asked_for_and_no_more_than_the_queue_holds() -> None:
    loader = ReadAhead(2, count=5)
    batches = iter(loader)
    assert next(batches) == 0
    assert loader.third.wait(60)
    assert all(thread.daemon for thread in readers()), "a script may end with a loop unfinished"
    assert loader.read <= 4
    loader.close_async_loader()
    assert readers() == []
    assert list(batches) in ([10, 20], [10])


def test_a_loop_that_is_left_ends_the_thread() -> None:
    for number in ReadAhead(1, count=5):
        assert number == 0
        break
    assert readers() == []


def test_an_error_is_raised_in_the_loop() -> None:
    with pytest.raises(ValueError, match="the file is damaged"):
        list(ReadAhead(64, count=9))
    assert readers() == []
