"""Manifests and Compose files: what they say, and that arguments come out of them as they went in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hubring.ps import cli
from hubring.ps.core.errors import ConfigError
from hubring.ps.observe import health, health_check
from hubring.ps.submit.engines import ENGINES
from hubring.ps.submit.job import assemble
from tests.support.submissions import IMAGE, WORDS, documents, expanded, inside, jobs, kinds


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
def test_pods_are_hardened_and_know_their_limits(kind: str) -> None:
    for found in jobs(
        "train.py", kind=kind, nodes=2, gpus=2, cpus=3, memory=5, checkpoint_dir=Path("/kept")
    ).values():
        pod, container = found["template"]["spec"], inside(found)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["terminationGracePeriodSeconds"] == 120
        assert pod["restartPolicy"] == "Never"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"] == container["resources"]["requests"]
        memory = next(one for one in pod["volumes"] if one["name"] == "shm")["emptyDir"]
        assert memory["medium"] == "Memory"
    worker = inside(jobs("train.py", nodes=2, gpus=2, cpus=3, memory=5)["worker"])
    assert worker["resources"]["limits"] == {"cpu": "6", "memory": "10Gi", "nvidia.com/gpu": "2"}
    assert {"name": "OMP_NUM_THREADS", "value": "3"} in worker["env"]
    assert worker["command"][3:7] == ["--nodes", "2", "--gpus", "2"]


def test_a_pod_of_several_workers_that_is_taken_away_stops_no_other() -> None:
    assert inside(jobs("train.py", nodes=2, gpus=2)["worker"])["command"][7:9] == ["--on-preempt", "leave"]
    for flags in ({"topology": "ring"}, {"on_preempt": "all"}):
        assert "leave" not in inside(jobs("train.py", nodes=2, gpus=2, **flags)["worker"])["command"]


def test_workers_are_pods_of_an_indexed_job_that_begins_once_the_server_is_ready() -> None:
    found = kinds("train.py")["JobSet"]["spec"]["replicatedJobs"]
    assert [one["name"] for one in found] == ["server", "worker"]
    assert found[1]["dependsOn"] == [{"name": "server", "status": "Ready"}]
    worker = found[1]["template"]["spec"]
    assert (worker["completionMode"], worker["completions"], worker["parallelism"]) == ("Indexed", 4, 4)
    server = inside(found[0]["template"]["spec"])
    command = ["ps-server", "health", "127.0.0.1:5555"]
    assert server["startupProbe"]["exec"]["command"] == [*command, "--service", health.READY]
    assert server["livenessProbe"]["exec"]["command"] == command
    assert "readinessProbe" not in server
    for probe in ("startupProbe", "livenessProbe"):
        assert server[probe]["timeoutSeconds"] > 2 * health_check.PATIENCE


def test_the_server_mounts_all_tokens_and_the_workers_theirs_alone() -> None:
    for name, entries in {"server": ["tokens", "tokens.key"], "worker": ["worker"]}.items():
        found = jobs("train.py")[name]
        assert {"name": "PS_TOKEN_FILE", "value": "/run/secrets/hubring/tokens"} in inside(found)["env"]
        assert {"name": "tokens", "mountPath": "/run/secrets/hubring", "readOnly": True} in inside(found)[
            "volumeMounts"
        ]
        mounted = next(one for one in found["template"]["spec"]["volumes"] if one["name"] == "tokens")[
            "secret"
        ]
        assert (mounted["secretName"], mounted["defaultMode"]) == ("hubring-tokens", 0o400)
        assert [item["key"] for item in mounted["items"]] == entries
        assert mounted["items"][0]["path"] == "tokens"


LOST = [69, 75, 129, 132, 134, 135, 136, 137, 139, 143]


def actions(job: dict[str, Any]) -> list[tuple[str, list[int] | str]]:
    rules = job["podFailurePolicy"]["rules"]
    return [
        (rule["action"], rule["onExitCodes"]["values"] if "onExitCodes" in rule else "taken away")
        for rule in rules
    ]


def test_a_hubs_worker_that_was_stopped_is_replaced_and_a_hopeless_one_is_not() -> None:
    found = jobs("train.py", requeue=True)
    assert actions(found["worker"]) == [("FailJob", [2]), ("Ignore", [69, 75]), ("Ignore", "taken away")]
    assert actions(found["server"]) == [("FailJob", LOST), ("FailJob", "taken away")]
    assert (found["worker"]["backoffLimit"], found["server"]["backoffLimit"]) == (3, 0)


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


def test_trainjob_has_a_runtime_of_its_own_whose_trainer_is_the_workers() -> None:
    found = kinds("train.py", kind="trainjob", nodes=2)
    reference = found["TrainJob"]["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (
        "TrainingRuntime",
        found["TrainingRuntime"]["metadata"]["name"],
    )
    assert found["TrainJob"]["spec"]["trainer"] == {"numNodes": 2}
    runtime = found["TrainingRuntime"]["spec"]
    assert runtime["mlPolicy"] == {"numNodes": 2}
    node = runtime["template"]["spec"]["replicatedJobs"][1]
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (node["name"], node["template"]["metadata"]["labels"]) == ("node", label)
    assert inside(node["template"]["spec"])["name"] == "node"


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


def test_only_the_jobs_own_pods_reach_it_and_the_page_is_open() -> None:
    policy = kinds("train.py")["NetworkPolicy"]["spec"]
    own = {"app.kubernetes.io/name": "hubring", "app.kubernetes.io/instance": "hubring"}
    assert policy["podSelector"] == {"matchLabels": own}
    assert policy["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": own}}]},
        {"ports": [{"protocol": "TCP", "port": 5556}]},
    ]
    assert all(found["template"]["metadata"]["labels"] == own for found in jobs("train.py").values())


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


def test_compose_services_are_hardened_and_wait_for_the_server() -> None:
    (file,) = documents("compose", "train.py", cpus=3, memory=5, checkpoint_dir=Path("/kept"))
    assert file["name"] == "hubring"
    assert file["networks"] == {"job": {}}
    for service in file["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service["user"].startswith(("0", "root"))
        limits = service["deploy"]["resources"]["limits"]
        assert (limits["cpus"], limits["memory"]) == ("3", "5g")
        assert service["stop_grace_period"] == "120s"
    worker, server = file["services"]["worker"], file["services"]["server"]
    assert worker["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert worker["deploy"]["replicas"] == 4
    assert server["healthcheck"]["test"] == ["CMD", "ps-server", "health", "127.0.0.1:5555"]
    assert "health" in [
        command.callback.__name__ for command in cli.app.registered_commands if command.callback
    ]
    tokens = {"type": "volume", "source": "tokens", "target": "/run/hubring"}
    assert server["volumes"] == [tokens, {"type": "volume", "source": "checkpoints", "target": "/kept"}]
    assert worker["volumes"] == [{**tokens, "read_only": True}]
    for service in (server, worker):
        assert service["environment"]["PS_TOKEN_FILE"] == "/run/hubring/tokens"
    assert "ports" not in worker
    assert server["ports"] == ["127.0.0.1::5556"]
    assert file["volumes"]["checkpoints"] == {}
    in_memory = file["volumes"]["tokens"]["driver_opts"]
    assert (in_memory["type"], "mode=0700" in in_memory["o"]) == ("tmpfs", True)


def test_compose_gives_all_gpus_to_one_container_whose_workers_share_them() -> None:
    (file,) = documents("compose", "train.py", workers=None, gpus=2)
    worker = file["services"]["worker"]
    assert worker["entrypoint"][3:7] == ["--nodes", "1", "--gpus", "2"]
    assert worker["deploy"]["replicas"] == 1
    (devices,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
