"""Flips bits: python -m tests.campaign.flips --flips 10000 --seed 1."""

from __future__ import annotations

import argparse
import logging
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.campaign.flips.files import files
from tests.campaign.flips.messages import wires
from tests.campaign.flips.place import Counts, Outcome, Place, table


def play(places: Sequence[Place], flips: int, draw: random.Random) -> Counts:
    """Flips bits at all places, by their shares; returns the outcomes by place."""
    shares = sum(place.share for place in places)
    return {place.name: _play(place, -(-flips * place.share // shares), draw) for place in places}


def _play(place: Place, flips: int, draw: random.Random) -> Counter[Outcome]:
    found: Counter[Outcome] = Counter()
    while found.total() < flips:
        bit = draw.randrange(place.bits)
        if (outcome := place.flip(bit)) is not None:
            found[outcome] += 1
            if outcome is Outcome.SILENT:
                print(f"{place.name}: bit {bit} of {place.bits} was not noticed", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.flips")
    parser.add_argument("--flips", type=int, default=10_000, help="number of flips, at least")
    parser.add_argument("--seed", type=int, default=1, help="chooses the bits")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # each flip in a checkpoint is logged
    draw = random.Random(arguments.seed)
    with TemporaryDirectory() as folder:
        counts = play([*wires(), *files(Path(folder) / "files")], arguments.flips, draw)
    print(table(counts))
    raise SystemExit(any(found[Outcome.SILENT] for found in counts.values()))


if __name__ == "__main__":
    main()
