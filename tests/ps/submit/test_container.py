"""Manifests and Compose files: what they say, and that arguments come out of them as they went in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hubring.ps.core.errors import ConfigError
from hubring.ps.observe import health
from hubring.ps.submit.engine import ENGINES
from hubring.ps.submit.job import assemble
from tests.support.submissions import IMAGE, WORDS, documents, expanded, inside, jobs, kinds, program


def interpolated(word: str) -> str:
    """As Compose does; whatever names a variable is lost."""
    return re.sub(r"\$(\$|\w+|\{[^}]*\})", lambda found: "$" if found[1] == "$" else "", word)


def test_kubernetes_hands_arguments_on_as_they_are() -> None:
    command = [expanded(word) for word in inside(jobs("train.py", *WORDS)["worker"])["command"]]
    assert command == [
        *("ps-worker", "--server", "hubring-server-0-0.hubring:5555", "--", "train.py"),
        *WORDS,
    ]


def test_compose_hands_arguments_on_as_they_are() -> None:
    (file,) = documents("compose", "train.py", *WORDS)
    command = [interpolated(word) for word in file["services"]["worker"]["entrypoint"]]
    together = ["--on-preempt", "all"]
    assert command == [*("ps-worker", "--server", "server:5555"), *together, "--", "train.py", *WORDS]


def texts(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Every value that is text; keys are ours."""
    if isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from texts(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from texts(value)
    elif isinstance(node, yaml.ScalarNode) and node.tag.endswith(":str"):
        yield node


@pytest.mark.parametrize("engine", ["kubernetes", "compose"])
def test_every_text_is_quoted_since_others_read_yaml_otherwise(engine: str) -> None:
    job = assemble({"engine": engine, "image": IMAGE, "workers": 2}, WORDS, None, {})
    found = [text for node in yaml.compose_all(ENGINES[engine].render(job)) for text in texts(node)]
    assert len(found) > len(WORDS)
    assert {text.style for text in found} == {'"'}


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_containers_know_their_limits_and_are_probed_with_patience(kind: str) -> None:
    for found in jobs("train.py", kind=kind, nodes=2, gpus=2, cpus=3, memory=5).values():
        container = inside(found)
        for probe in [one for name, one in container.items() if name.endswith("Probe")]:
            assert probe["timeoutSeconds"] > 2 * health.PATIENCE
        assert container["resources"]["limits"] == container["resources"]["requests"]
    worker = inside(jobs("train.py", nodes=2, gpus=2, cpus=3, memory=5)["worker"])
    assert worker["resources"]["limits"] == {"cpu": "6", "memory": "10Gi", "nvidia.com/gpu": "2"}
    assert {"name": "OMP_NUM_THREADS", "value": "3"} in worker["env"]
    assert worker["command"][3:7] == ["--nodes", "2", "--gpus", "2"]
    assert "--accelerator" not in worker["command"]
    command = inside(jobs("train.py", nodes=2, workers=4)["worker"])["command"]
    assert command[3:9] == ["--nodes", "2", "--gpus", "2", "--accelerator", "cpu"]


def test_a_pod_of_several_workers_that_is_taken_away_stops_no_other() -> None:
    assert inside(jobs("train.py", nodes=2, gpus=2)["worker"])["command"][7:9] == ["--on-preempt", "leave"]
    for flags in ({"topology": "ring"}, {"on_preempt": "all"}):
        assert "leave" not in inside(jobs("train.py", nodes=2, gpus=2, **flags)["worker"])["command"]


LOST = [69, 75, 129, 132, 134, 135, 136, 137, 139, 143]


def actions(job: dict[str, Any]) -> list[tuple[str, list[int] | str]]:
    rules = job["podFailurePolicy"]["rules"]
    return [
        (rule["action"], rule["onExitCodes"]["values"] if "onExitCodes" in rule else "taken away")
        for rule in rules
    ]


@pytest.mark.parametrize("flags", [{"topology": "ring"}, {"aggregate": True}, {"colocate": True}])
def test_where_all_stand_together_a_worker_that_was_stopped_ends_the_round(flags: dict[str, Any]) -> None:
    worker = jobs("train.py", **flags)["worker"]
    assert actions(worker) == [("FailJob", LOST), ("FailJob", "taken away")]
    assert worker["backoffLimit"] == 0


@pytest.mark.parametrize(
    ("flags", "targets"), [({}, ["server"]), ({"topology": "ring"}, ["server", "worker"])]
)
def test_a_job_that_lost_a_process_begins_again_a_few_times_and_a_preempted_one_always(
    flags: dict[str, Any], targets: list[str]
) -> None:
    def policy(**more: Any) -> dict[str, Any]:
        found: dict[str, Any] = kinds("train.py", **flags, **more)["JobSet"]["spec"]["failurePolicy"]
        return found

    assert "failurePolicy" not in kinds("train.py", **flags)["JobSet"]["spec"]
    saved = policy(checkpoint_dir=Path("/kept"))
    lost, failed = saved["rules"]
    assert (saved["maxRestarts"], lost["action"]) == (3, "RestartJobSet")
    assert (lost["targetReplicatedJobs"], lost["onJobFailureReasons"]) == (targets, ["PodFailurePolicy"])
    assert failed == {"name": "failed", "action": "FailJobSet"}
    assert policy(restarts=7)["maxRestarts"] == 7
    assert policy(requeue=True)["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"


@pytest.mark.parametrize(
    ("flags", "mode", "mounts"),
    [
        ({}, "ReadWriteOnce", {"server": True, "worker": False}),
        ({"topology": "ring"}, "ReadWriteMany", {"server": False, "worker": True}),
        ({"colocate": True}, "ReadWriteMany", {"server": True, "worker": True}),
    ],
)
def test_checkpoints_have_a_claim_that_those_mount_who_write(
    flags: dict[str, Any], mode: str, mounts: dict[str, bool]
) -> None:
    given = {"checkpoint_dir": Path("/kept"), **flags}
    claim = kinds("train.py", **given)["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == [mode]
    for name, found in jobs("train.py", **given).items():
        places = [one["mountPath"] for one in inside(found)["volumeMounts"]]
        assert ("/kept" in places) is mounts[name]
        volumes = found["template"]["spec"]["volumes"]
        claims = [
            one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one
        ]
        assert claims == ([claim["metadata"]["name"]] if mounts[name] else [])


@pytest.mark.parametrize(("setting", "ports"), [("no_page = true", [5555]), ("page_port = 80", [5555, 80])])
def test_the_page_is_where_the_server_was_told(tmp_path: Path, setting: str, ports: list[int]) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"[server]\n{setting}\n")
    text = ENGINES["kubernetes"].render(
        assemble({"engine": "kubernetes", "image": IMAGE, "workers": 2}, [], file, {})
    )
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    server = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert [one["containerPort"] for one in inside(server)["ports"]] == ports
    opened = [
        port["port"] for rule in found["NetworkPolicy"]["spec"]["ingress"][1:] for port in rule["ports"]
    ]
    assert opened == ports[1:]


def test_time_ends_both_jobs() -> None:
    found = jobs("train.py", time="1:00:00")
    assert {one["activeDeadlineSeconds"] for one in found.values()} == {3600}


@pytest.mark.parametrize("engine", ["kubernetes", "compose"])
@pytest.mark.parametrize("folder", ["kept", "/a:b"])
def test_a_folder_that_no_volume_can_be_at_is_refused(engine: str, folder: str) -> None:
    with pytest.raises(ConfigError, match="absolute path without colons"):
        documents(engine, checkpoint_dir=Path(folder))


def test_compose_services_know_their_limits() -> None:
    (file,) = documents("compose", "train.py", cpus=3, memory=5)
    for service in file["services"].values():
        limits = service["deploy"]["resources"]["limits"]
        assert (limits["cpus"], limits["memory"]) == ("3", "5g")


def test_compose_gives_all_gpus_to_one_container_whose_workers_share_them() -> None:
    (file,) = documents("compose", "train.py", workers=None, gpus=2)
    worker = file["services"]["worker"]
    assert worker["entrypoint"][3:7] == ["--nodes", "1", "--gpus", "2"]
    assert worker["deploy"]["replicas"] == 1
    (devices,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}


DEPLOY = Path(__file__).parents[3] / "deploy"
COMMANDS = {
    found[2]: shlex.split(found[1])
    for found in re.finditer(r"(?m)^ps-server submit (.+) > (\S+)$", (DEPLOY / "SUBMIT.md").read_text())
}


@pytest.mark.parametrize("path", COMMANDS)
def test_the_example_is_what_its_command_prints(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program(*COMMANDS[path]) == 0
    assert (DEPLOY / "examples" / path).read_text() == capsys.readouterr().out


def test_every_example_has_its_command() -> None:
    assert {path.name for path in (DEPLOY / "examples").iterdir()} == COMMANDS.keys()
