"""What deploy/monitoring asks of a hub exists: metrics, labels, files. Whether it works, system tests say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import yaml

from hubring.ps.observe.metrics import METRICS
from tests.deploy.monitoring import DASHBOARD, MONITORING, exported, panels, series_of
from tests.deploy.recipe import services

PROMETHEUS_OWN = {"up", "ALERTS"}
TARGET_LABELS = {"job", "instance"}
"""What Prometheus adds to everything that it scrapes."""
WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}


@cache
def read(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("rules.yml")["groups"] for rule in group["rules"]]


def targets() -> list[dict[str, Any]]:
    return [target for panel in panels() for target in panel["targets"]]


def metric_names(query: str) -> set[str]:
    """The metrics that a PromQL query reads."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    found = re.findall(r"(?<![\w:])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", bare)
    return set(found) - WORDS


def label_names(query: str) -> set[str]:
    """The labels that a PromQL query names."""
    grouped = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", query)
    matched = re.findall(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*\"", query)
    return {name.strip() for group in grouped for name in group.split(",") if name.strip()} | set(matched)


def known() -> set[str]:
    return exported() | {rule["record"] for rule in rules() if "record" in rule} | PROMETHEUS_OWN


def queries() -> Iterator[tuple[str, str]]:
    """Each query with where it stands."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    labels = {name for metric in METRICS for name in metric.labels} | TARGET_LABELS | {"le", "alertstate"}
    for where, query in queries():
        names = metric_names(query)
        assert names, where
        assert names <= known(), where
        assert label_names(query) <= labels, where


def test_legends_name_labels_that_exist() -> None:
    labels = {name for metric in METRICS for name in metric.labels} | TARGET_LABELS | {"le"}
    shown = {name for target in targets() for name in re.findall(r"{{(\w+)}}", target["legendFormat"])}
    assert shown <= labels


def test_every_metric_is_watched() -> None:
    watched = set().union(*(metric_names(query) for _, query in queries()))
    left = {metric.name for metric in METRICS if not series_of(metric) & watched}
    assert left <= {
        "ps_uptime_seconds",
        "ps_draining",
        "ps_epoch",
        "ps_checkpoints_total",
        "ps_shard_keys",
        "ps_shard_oldest_version",
        "ps_shard_newest_version",
    }, "these are for people who look closer"


def test_every_alert_is_seen_to_fire() -> None:
    tests = [each for test in read("rules_test.yml")["tests"] for each in test.get("alert_rule_test", [])]
    fired = {each["alertname"] for each in tests if each.get("exp_alerts")}
    held = {each["alertname"] for each in tests if not each.get("exp_alerts")}
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert fired == held == alerts


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
            assert re.search(r"[:;] ", rule["annotations"]["summary"]), "what is wrong, then the fix"


def test_prometheus_scrapes_the_servers_of_the_compose_demo() -> None:
    config = read("prometheus.yml")
    (scrape,) = config["scrape_configs"]
    served = {name: service for name, service in services().items() if "--once" in service.get("command", "")}
    assert all("outside" in service["networks"] for service in [*served.values(), services()["prometheus"]])
    assert scrape["static_configs"] == [{"targets": [f"{name}:5556" for name in served]}]
    assert scrape["job_name"] == "hubring"
    assert all((MONITORING / name).is_file() for name in config["rule_files"])


def test_grafana_finds_its_data_and_its_dashboard() -> None:
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    dashboard = json.loads(DASHBOARD.read_text())
    used = [panel["datasource"] for panel in panels()] + [target["datasource"] for target in targets()]
    used += [variable["datasource"] for variable in dashboard["templating"]["list"]]
    assert {(each["type"], each["uid"]) for each in used} == {(source["type"], source["uid"])}
    (provider,) = read("grafana/provisioning/dashboards/hubring.yml")["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def test_panels_neither_share_a_number_nor_a_place() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for one, other in combinations([panel["gridPos"] for panel in panels()], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels())
