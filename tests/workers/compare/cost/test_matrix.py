"""The matrix of settings covers what predictions must hold for, and its table says whether they do."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest

from hubring.workers.compare.cost.built_in import tensors
from hubring.workers.compare.result.findings import Prediction
from tests.support.compare import matrix
from tests.support.compare.matrix import COUNT, GROUPS, table
from tests.support.compare.results import minimal


def values(found: object) -> list[object]:
    return found if isinstance(found, list) else [found]


def test_the_matrix_has_more_settings_than_must_count() -> None:
    seen = set()
    for group in GROUPS:
        for keys in group.experiments:
            link = keys["link"]
            combined = product(values(keys["servers"]), values(link["rate"]), values(link.get("latency")))
            seen |= {(group.name, keys["workers"], *each, str(keys.get("straggler"))) for each in combined}
    calibrated = len(GROUPS)
    assert len(seen) - calibrated >= COUNT
    assert {workers for _, workers, *_ in seen} == {2, 4, 8}
    assert {servers for _, _, servers, *_ in seen} == {1, 2, 4}
    assert {rate for _, _, _, rate, *_ in seen} == {"20mbit", "100mbit", "300mbit", "1gbit"}


def test_the_table_counts_only_what_was_predicted() -> None:
    known = Prediction("n2 k1", "ring", 100.0, 100.0, 0.0, calibrated=True)
    good, bad = (Prediction("n4 k1", "ring", 100.0, 100.0 * (1 + error), error) for error in (0.05, -0.25))
    lines = table([("small", each) for each in (known, *[good] * COUNT)])
    assert lines[-1].startswith(f"{COUNT} predictions, mean error 5.0%, worst 5.0%: within the targets")
    assert "calibrated" in lines[1]
    assert "+5.0%" in lines[2]
    assert ": not within" in table([("small", each) for each in (*[good] * COUNT, bad)])[-1]
    assert table([("small", known)])[-1] == "no prediction counts"


@pytest.mark.parametrize(
    ("words", "code"), [([], 1), (["--few"], 0), (["--only", "small"], 0), (["--only", "one-slice"], 0)]
)
def test_only_a_full_run_must_have_all_settings(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Prediction("n4 k1", "ring", 100.0, 105.0, 0.05)
    results = tmp_path / "results.json"
    results.write_text(json.dumps(minimal()))
    monkeypatch.setattr(matrix, "run", lambda *_, **__: [tmp_path])
    monkeypatch.setattr(matrix, "scored", lambda *_: [good])
    monkeypatch.setattr(sys, "argv", ["matrix", "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert ended.value.code == code


def test_digits_has_the_parameters_of_its_network() -> None:
    from hubring.workers.examples.digits import network

    for hidden in (0, 1, 250, 3000):
        sizes = tuple(4 * parameter.numel() for parameter in network(0, hidden).parameters())
        assert tensors("digits", sum(sizes)) == sizes
        assert tensors("digits", round(1.0001 * sum(sizes))) == sizes
    assert tensors("digits", 20_000) == tensors("char-lm", 39_720) == tensors(None, 39_720) == ()
