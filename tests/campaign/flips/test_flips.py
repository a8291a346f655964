"""A bit that flips on a wire or in a file is noticed, or changes nothing that its reader gets."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.campaign.flips.__main__ import play
from tests.campaign.flips.files import files
from tests.campaign.flips.messages import Wire, wires
from tests.campaign.flips.place import Outcome, Place

FLIPS = 300


def silent(places: list[Place], flips: int) -> Counter[str]:
    """Returns the number of silent flips by place."""
    found = play(places, flips, random.Random(7))
    assert sum(each.total() for each in found.values()) >= flips
    return Counter({name: each[Outcome.SILENT] for name, each in found.items() if each[Outcome.SILENT]})


def test_no_flip_in_a_message_is_silent() -> None:
    assert not silent([*wires()], FLIPS)


@pytest.mark.slow
def test_no_flip_in_a_file_is_silent(tmp_path: Path) -> None:
    assert not silent([*files(tmp_path / "files")], FLIPS)


def test_a_flip_that_no_checksum_covers_is_found() -> None:
    bare = Wire("bare", lambda message: [message.header], lambda parts: (parts[0], b""), errors=(ValueError,))
    assert silent([bare], 10) == {"bare": 10}
