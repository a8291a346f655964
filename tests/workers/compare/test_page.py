"""The page says what the results say and nothing else, to everybody, and needs nothing from anywhere."""

from __future__ import annotations

import math
import re
import tomllib
from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace

from hubring.ps.core.errors import ConfigError, HubringError
from hubring.workers.compare.findings import encode
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.show.figures import record_share
from hubring.workers.compare.show.page import page
from hubring.workers.compare.show.screen import notes
from hubring.workers.compare.statistics import Number
from tests.support.compare.results import BARE, EMULATED, full, minimal, read, summary
from tests.support.pages.html_tree import Node, html_tree


@pytest.fixture(scope="module")
def html() -> str:
    return page(read(full()))


@pytest.fixture(scope="module")
def tree(html: str) -> Node:
    return html_tree(html)


def small() -> dict[str, Any]:
    """A page that is made quickly: only the emulated setting, without curves."""
    results = full()
    results["rows"] = [each for each in results["rows"] if each["setting"] == EMULATED.key]
    return results | {"curves": []}


def test_the_page_fetches_nothing_and_runs_nothing(html: str, tree: Node) -> None:
    for node in tree.all("*"):
        links = node.attributes.keys() & {"src", "href", "srcset", "data"}
        assert all(node.attributes[link].startswith("#") for link in links), f"{node.tag} {links}"
        assert not any(name.startswith("on") for name in node.attributes)
    assert not list(tree.all("script"))
    assert set(re.findall(r"url\([^)]*\)", html)) == {"url(#hatch)"}
    assert "@import" not in html
    policies = [each.attributes for each in tree.all("meta") if "http-equiv" in each.attributes]
    assert policies[0]["content"] == "default-src 'none'; style-src 'unsafe-inline'"


@pytest.mark.parametrize("size", ["full", "minimal"])
def test_every_id_stands_once_and_every_reference_leads_somewhere(size: str, tree: Node) -> None:
    nodes = list((tree if size == "full" else html_tree(page(read(minimal())))).all("*"))
    ids = [node.attributes["id"] for node in nodes if "id" in node.attributes]
    assert len(set(ids)) == len(ids)
    for node in nodes:
        named = node.attributes.keys() & {"aria-labelledby", "aria-describedby", "href"}
        assert {node.attributes[name].removeprefix("#") for name in named} <= set(ids)


def test_the_verdict_comes_first_and_the_sections_in_their_order(tree: Node) -> None:
    heads = [each.text for each in tree.all("h1")]
    assert heads == [
        "With 4 servers the hub beats the ring on 1\u00a0Gbit/s links by 17\u00a0%; with 1 or 2 it loses."
    ]
    assert [each.attributes["id"] for each in tree.all("section")] == [
        *("words", "gate", "accuracy", "loss", "throughput", "breakdown", "staleness"),
        *("scaling", "predictions", "bandwidth", "numbers", "noise", "repeat"),
    ]


def test_every_drawing_has_a_title_a_summary_and_its_numbers(tree: Node) -> None:
    figures = list(tree.all("figure"))
    charts = [each for each in tree.all("svg") if each.attributes.get("role") == "img"]
    assert sum(any(True for _ in figure.all("svg")) for figure in figures) == len(figures)
    for figure in figures:
        assert figure.one("h3").text
        assert figure.one("details").one("table").one("caption").text
    for chart in charts:
        assert {"aria-labelledby", "aria-describedby"} <= chart.attributes.keys()
    drawn = [each for figure in figures for each in figure.all("svg") if each in charts]
    assert len(drawn) == len(charts) > 20


def test_tables_have_captions_and_every_head_its_scope(tree: Node) -> None:
    tables = list(tree.all("table"))
    assert len(tables) > 20
    for each in tables:
        assert each.one("caption").text
        assert {head.attributes["scope"] for head in each.all("th")} == {"col", "row"}
        assert all(head.text for head in each.one("thead").all("th"))


def test_text_of_the_results_never_becomes_markup() -> None:
    results = small()
    evil = "</style><img src=x onerror=alert(1)>&"
    results["rows"][0] |= {"row": evil, "about": evil, "withheld": evil}
    results["settings"] = [each | {"key": each["key"]} for each in results["settings"]]
    results |= {"command": evil, "verdict": [evil, evil], "machine": {evil: {evil: evil}}}
    results["experiment"] |= {"name": evil, "about": evil, "arguments": [evil]}
    results["job"] |= {"name": evil, "title": evil, "samples": evil}
    results["noise"]["said"] = [evil]
    results["gate"]["pairs"][0] |= {"tensor": evil, "second": evil}
    made = page(read(results))
    assert "<img" not in made
    assert not list(html_tree(made).all("img"))
    assert made.count("</style>") == 1


def test_the_command_and_the_experiment_can_be_copied_as_they_are(tree: Node) -> None:
    codes = [each.text for each in tree.all("code")]
    assert codes[0] == full()["command"]
    written = convert(tomllib.loads(codes[1]), Experiment)
    assert written == convert(full()["experiment"], Experiment)


def test_a_withheld_row_says_why_it_has_no_speed() -> None:
    made = page(read(full()))
    assert "speed withheld" in made
    assert "hub-aggregate differs from local by 0.031 in head.weight" in made


def test_rows_that_slept_say_so_at_their_name_wherever_they_stand() -> None:
    tree = html_tree(page(read(small())))
    for part in ("throughput", "breakdown"):
        section = tree.section(part)
        names = [each.text for each in section.all("span") if each.attributes.get("class") == "who"]
        rows = [each.text for each in section.all("th") if each.attributes["scope"] == "row"]
        assert len(names) == len(rows) == 5
        for name in (*names, *rows):
            slept = "compute" if "local" in name else "compute and stragglers"  # of rank 3, which it lacks
            assert name.endswith(f"emulated {slept}")


def test_a_page_of_little_says_what_is_missing() -> None:
    tree = html_tree(page(read(minimal())))
    assert [each.text for each in tree.all("h1")] == ["No verdict for this experiment."]
    sections = [each.attributes["id"] for each in tree.all("section")]
    assert sections == ["gate", "throughput", "numbers", "noise", "repeat"]
    text = tree.text
    assert "Not part of this experiment: in words, progress by time, progress by samples, step time," in text
    assert "one seed" in text
    assert "no two rows that should compute the same finished without a fault" in text


def test_a_number_without_value_is_a_dash_and_never_a_zero() -> None:
    results = minimal()
    results["rows"][0]["numbers"] |= {"samples_per_second": None, "final_loss": summary([0.5])}
    tree = html_tree(page(read(results)))
    section = tree.section("throughput")
    assert "not measured" in section.text
    assert [each.text for each in section.all("td")] == ["–", "–", "–", "–", "–", "–", "0.500", "1"]


def test_seeds_that_missed_the_target_are_counted() -> None:
    results = small()
    results["rows"] = results["rows"][:2]
    results["rows"][0]["numbers"]["seconds_to_target"] = summary([2.0, None, 2.0])
    results["rows"][1]["numbers"]["seconds_to_target"] = None
    text = html_tree(page(read(results))).text
    assert "0.93 reached after 2.00\u00a0s, but not in 1 of 3 seeds" in text
    assert "0.93 not reached" in text


def test_the_crossing_is_marked_where_measurement_and_prediction_have_it(tree: Node) -> None:
    section = tree.section("scaling")
    marked = [each.text for each in section.all("text") if each.text.startswith("crossover")]
    assert marked == ["crossover measured", "crossover predicted"] * 2
    assert (
        "The hub is faster than the ring with 3.2 or more servers; predicted: with 2.8 or more servers;"
        " by bytes alone (k > n^2/(2(n-1))): with 3 or more servers." in section.text
    )


def test_the_share_of_the_gate_s_record_is_told_once_and_not_at_first() -> None:
    results = full()
    results["gate"]["steps"] = [{"setting": BARE.key, "row": "local", "seed": 0, "steps": 100, "judged": 100}]
    for row, record in (("local", 0.53), ("hub-bsp", 2.0)):
        for entry in (each for each in results["rows"] if each["row"] == row):
            step = entry["numbers"]["step_ms"]["median"]
            entry["numbers"] |= {"step_mean_ms": summary([step]), "record_ms": summary([record / 100 * step])}
    found = read(results)
    said = (
        "The gate's own record takes 0.5% (local) to 2.0% (hub-bsp) of a step. It is part of all times above."
    )
    assert notes(found).count(said) == 1
    text = html_tree(page(found)).text
    assert text.count(said) == 1
    assert text.index(said) > text.index("Do the rows agree, and is every step right?")
    assert record_share(read(full())) == ""


def test_results_of_another_version_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"version 1; expected version 3\. Read it with the release that wrote it"
    ):
        read(minimal() | {"version": 1})


def test_results_that_are_not_what_they_should_be_are_refused_with_the_place() -> None:
    results = minimal()
    results["rows"][0]["seeds"] = ["a"]
    with pytest.raises(
        ConfigError, match=r"results.json: Expected `int`, got `str` - at `\$.rows\[0\].seeds\[0\]`"
    ):
        read(results)


def test_a_row_under_a_setting_that_the_results_do_not_have_is_named() -> None:
    results = minimal()
    results["rows"][0]["setting"] = "n9 k1"
    with pytest.raises(ConfigError, match=r"the results have no setting 'n9 k1'; expected one of 'n2 k1'"):
        page(read(results))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_place(value: float) -> None:
    findings = read(minimal())
    encode(findings)
    (entry,) = findings.rows
    odd = replace(entry, numbers=entry.numbers | {"step_ms": Number([value], value, value, value)})
    with pytest.raises(HubringError, match=rf"rows\[0\]\.numbers\.step_ms\.values\[0\] is {value}"):
        encode(replace(findings, rows=[odd]))


def test_a_setting_that_calibrated_its_row_is_neither_drawn_nor_scored(tree: Node) -> None:
    lines = [
        line for line in tree.section("predictions").all("tr") if "hub-" in line.text or "ring" in line.text
    ]
    own = [line.text for line in lines if "yes, so it does not count" in line.text]
    assert own
    assert all("%" not in text for text in own)
    drawn = [each.text for each in tree.section("predictions").one("figure").all("title")]
    assert drawn
    assert not any(text.startswith("ring") for text in drawn), "ring was calibrated in all settings"


def test_predictions_of_rows_whose_error_nobody_measured_are_marked(tree: Node) -> None:
    lines = {line.text for line in tree.section("predictions").all("tr")}
    assert all(("(not scored)" in text) == ("hub-ssp" in text or "hub-aggregate" in text) for text in lines)
    assert any("(not scored)" in text for text in lines)
