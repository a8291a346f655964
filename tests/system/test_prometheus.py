"""deploy/monitoring in the hands of Prometheus itself: promtool on its files, a server on a live job."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode

import pytest

from tests.deploy.monitoring import MONITORING, exported, panels
from tests.support.needs import needs
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.http import OPENER
from tests.support.processes.ports import free_port
from tests.support.unreported_metrics import UNREPORTED

PROGRAMS = {name: shutil.which(name) for name in ("promtool", "prometheus")}

pytestmark = [pytest.mark.slow, *needs(all(PROGRAMS.values()), "Prometheus", "apt-get install prometheus")]

STEPS_DONE = 20
UNFILLED = [
    *("Alerts", "Samples per second", "Progress", "Time left"),
    *("GPU memory", "Refused and damaged", "Ring"),
]
"""The panels of what the job does not report."""


def promtool(*arguments: str, given: bytes | None = None) -> None:
    """Runs a check in deploy/monitoring; it must find nothing."""
    ran = subprocess.run(
        ["promtool", *arguments], cwd=MONITORING, input=given, capture_output=True, timeout=120
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr).decode()


def test_promtool_takes_configuration_and_rules_and_alerts_fire_when_they_should() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", "rules.yml")
    promtool("test", "rules", "rules_test.yml")


class Prometheus:
    """One that scrapes a hub, by our configuration with another target."""

    def __init__(self, cluster: Cluster, folder: Path, target: str) -> None:
        shutil.copy(MONITORING / "rules.yml", folder)
        config = (MONITORING / "prometheus.yml").read_text()
        ours = '["server:5556", "ring-server:5556"]'
        assert ours in config
        (folder / "prometheus.yml").write_text(config.replace(ours, f'["{target}"]'))
        self._address = f"127.0.0.1:{free_port()}"
        self.program: Program = cluster.start(
            "prometheus",
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
        )
        self.program.until(lambda: self._get("/-/ready") is not None, "Prometheus")

    def _get(self, path: str) -> str | None:
        try:
            with OPENER.open(f"http://{self._address}{path}", timeout=30) as answer:
                return answer.read().decode()
        except (URLError, ConnectionError):
            return None

    def ask(self, path: str, **arguments: str) -> Any:
        """What its API answers."""
        answer = self._get(f"/api/v1/{path}?{urlencode(arguments)}")
        assert answer is not None, f"{path} {arguments} was refused:\n{self.program.said()}"
        return json.loads(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression yields now."""
        return self.ask("query", query=expression)["result"]


def test_prometheus_scrapes_a_live_job(cluster: Cluster, tmp_path: Path) -> None:
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    server, address = cluster.server("--workers", "2", "--page-port", "0", "--once", *saved)
    pair = cluster.held(address, at=STEPS_DONE)
    found = re.search(r"http://(\S+)/metrics", server.said())
    assert found, server.said()
    with OPENER.open(found[0], timeout=30) as answer:
        promtool("check", "metrics", given=answer.read())
    prometheus = Prometheus(cluster, tmp_path, found[1])
    both = {("0", str(STEPS_DONE)), ("1", str(STEPS_DONE))}
    prometheus.program.until(lambda: steps(prometheus) == both, "the workers' steps")

    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    names = prometheus.ask("label/__name__/values")
    assert {name for name in names if name.startswith("ps_")} == exported() - set(UNREPORTED)
    prometheus.program.until(lambda: empty(prometheus) == UNFILLED, "data in every panel")
    prometheus.program.until(lambda: rules(prometheus) == {"ok"}, "every rule evaluated")

    cluster.go.touch()
    for program in (*pair, server):
        program.done()
    prometheus.program.process.send_signal(signal.SIGTERM)
    assert prometheus.program.wait() == 0


def steps(prometheus: Prometheus) -> set[tuple[str, str]]:
    """Rank and completed steps of each worker."""
    series = prometheus.query("ps_worker_steps_total")
    return {(each["metric"]["rank"], each["value"][1]) for each in series}


def empty(prometheus: Prometheus) -> list[str]:
    """The dashboard's panels of which some query yields nothing."""
    return [
        panel["title"]
        for panel in panels()
        if not all(prometheus.query(target["expr"].replace("$instance", ".*")) for target in panel["targets"])
    ]


def rules(prometheus: Prometheus) -> set[str]:
    """How the rules are: ok, err, or unknown before their first evaluation."""
    return {rule["health"] for group in prometheus.ask("rules")["groups"] for rule in group["rules"]}
