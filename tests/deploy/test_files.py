"""What is seen of image and fleet without an engine: they are closed to strangers, and name what exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any

import pytest
import typer

from hubring.ps import cli as server_cli
from hubring.ps.config.sources import load_server, load_worker
from hubring.workers.programs import ps_worker as worker_cli
from tests.deploy.recipe import DEPLOY, ROOT, instructions, recipe, services, variables

SERVICES = services()
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("hubring:")]
SERVERS = [name for name in OURS if SERVICES[name]["command"].startswith("ps-server")]
WORKERS = [name for name in OURS if SERVICES[name]["command"].startswith("ps-worker")]
OPENINGS = {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc", "userns_mode", "volumes_from"}
CUDA = DEPLOY / "compose.cuda.yaml"
USER = "10001:10001"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_may_do_nothing_that_it_need_not(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].partition(":")[0]) > 0
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert re.fullmatch(r"\d+[mg]", service["shm_size"])
    assert service["pids_limit"] > 0
    assert not OPENINGS & set(service)


def test_ports_are_published_on_loopback_alone() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if service.get("ports")}
    assert set(published) == {"server", "ring-server", "prometheus", "grafana"}
    for name, ports in published.items():
        assert [port for port in ports if not port.startswith("127.0.0.1:")] == [], name


def test_gradients_travel_on_a_network_without_a_way_out() -> None:
    assert recipe()["networks"]["training"] == {"internal": True}
    inside = {name: SERVICES[name]["networks"] for name in [*WORKERS, "shard"]}
    assert all(networks == ["training"] for networks in inside.values())


@pytest.mark.parametrize("name", WORKERS)
def test_workers_wait_until_their_server_is_healthy(name: str) -> None:
    ((server, condition),) = SERVICES[name]["depends_on"].items()
    assert condition == {"condition": "service_healthy"}
    assert SERVICES[server]["healthcheck"]["test"] == ["CMD", "ps-server", "health", "127.0.0.1:5555"]
    assert f"--server {server}:5555 " in SERVICES[name]["command"]


def test_a_server_is_stopped_before_its_shards() -> None:
    assert "shard" in SERVICES["server"]["depends_on"]
    assert "depends_on" not in SERVICES["shard"]
    checkpoints = "checkpoints:/checkpoints"
    assert checkpoints in SERVICES["shard"]["volumes"]
    assert checkpoints in SERVICES["server"]["volumes"]


def options(app: typer.Typer, name: str, words: list[str]) -> dict[str, Any]:
    """What a program's command line says, by the program's own reading."""
    command: Any = typer.main.get_command(app)
    if words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    said = dict(command.make_context(name, words).params)
    said.pop("config")
    said.pop("command", None)
    said.pop("module", None)
    return said


@pytest.mark.parametrize("name", ["compose.yaml", "README.md"])
def test_scale_commands_in_the_docs_set_workers_to_the_same_number(name: str) -> None:
    lines = [line for line in (DEPLOY / name).read_text().splitlines() if "--scale worker" in line]
    assert lines
    for line in lines:
        assert re.search(r"\bWORKERS=(\d+) docker compose .* --scale worker=\1\b", line), line


@pytest.mark.parametrize("name", SERVERS)
def test_servers_are_told_what_they_know(name: str) -> None:
    config = load_server(
        options(server_cli.app, "ps-server", shlex.split(SERVICES[name]["command"])[1:]), environment={}
    )
    assert not config.insecure
    assert config.once or config.join
    assert (config.shards, config.await_shards, config.workers) == {
        "server": (0, 2, 2),
        "shard": (1, 0, 0),
        "ring-server": (1, 0, 2),
    }[name]
    assert config.colocate is (name == "ring-server")  # no shard process that nobody asks for anything


@pytest.mark.parametrize("name", OURS)
def test_the_programs_of_a_job_share_tokens_that_its_server_makes(name: str) -> None:
    assert SERVICES[name]["environment"]["PS_TOKEN_FILE"] == "/run/hubring/tokens"
    volume = "ring-tokens" if name.startswith("ring") else "tokens"
    mode = "" if name in ("server", "ring-server") else ":ro"
    assert f"{volume}:/run/hubring{mode}" in SERVICES[name]["volumes"]
    assert recipe()["volumes"][volume]["driver_opts"]["type"] == "tmpfs"
    mounting = {each for each, service in SERVICES.items() if f"{volume}:" in str(service.get("volumes"))}
    assert mounting <= set(OURS)


@pytest.mark.parametrize("name", WORKERS)
def test_workers_are_told_what_they_know(name: str) -> None:
    words = shlex.split(SERVICES[name]["command"])[1:]
    config = load_worker(options(worker_cli.app, "ps-worker", words), environment={})
    assert config.topology == {"worker": "hub", "ring": "ring"}[name]
    assert config.on_preempt == "all"


def test_a_variable_has_one_default_wherever_it_stands() -> None:
    assert {name: found for name, found in variables().items() if len(found) > 1} == {}


def test_the_readme_tells_of_every_variable() -> None:
    readme = (DEPLOY / "README.md").read_text()
    assert variables()
    assert [name for name in variables() if f"`{name}`" not in readme] == []


VOLUMES = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]


def test_files_that_are_mounted_exist_and_are_not_written_to() -> None:
    mounts = [volume for volume in VOLUMES if volume.startswith(".")]
    assert len(mounts) == 4
    assert [mount for mount in mounts if not mount.endswith(":ro")] == []
    assert [mount for mount in mounts if not (DEPLOY / mount.partition(":")[0]).exists()] == []


def test_every_volume_that_is_declared_is_mounted_and_no_other() -> None:
    named = {volume.partition(":")[0] for volume in VOLUMES if not volume.startswith(".")}
    assert named == set(recipe()["volumes"])


def test_gpus_change_the_image_of_all_and_the_devices_of_workers() -> None:
    changed = services(CUDA)
    assert set(changed) == set(OURS)
    index = {service["build"]["args"]["TORCH_INDEX"] for service in changed.values()}
    assert index == {"https://download.pytorch.org/whl/cu130"}
    assert {name for name, service in changed.items() if "deploy" in service} == set(WORKERS)


def test_compose_builds_the_dockerfile_that_lies_here() -> None:
    arguments = {rest.partition("=")[0] for word, rest in instructions() if word == "ARG"}
    for name in OURS:
        build = SERVICES[name]["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert set(build["args"]) <= arguments


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    return found[max(index for index, (word, _) in enumerate(found) if word == "FROM") :]


def test_packages_are_pinned_by_the_constraints() -> None:
    pip = [
        rest
        for word, rest in instructions()
        if word == "RUN" and re.search(r"/pip/bin/pip .*(install|wheel)", rest)
    ]
    pinned = [rest for rest in pip if "--mount=type=bind,from=wheels,target=/wheels" in rest]
    (programs,) = [rest for rest in pip if rest not in pinned]
    assert len(pinned) == 3
    assert "--no-index --no-deps /dist/*.whl" in programs
    environment = " ".join(rest for word, rest in instructions() if word == "ENV")
    assert "PIP_CONSTRAINT=/wheels/constraints.txt" in environment
    assert ("COPY", "constraints.txt wheel[s] /") in instructions()


def test_the_image_runs_as_nobody_special_and_has_no_tools() -> None:
    stage = last_stage()
    assert ("USER", USER) in stage
    assert {SERVICES[name]["user"] for name in OURS} == {USER}
    runs = " ".join(rest for word, rest in stage if word == "RUN")
    assert not re.search(r"\b(apt|apt-get|apk|gcc|make|curl|wget)\b", runs)
    assert "--mount=type=bind,from=programs,source=/pip,target=/pip" in runs, "pip is only lent"
    assert [rest for word, rest in stage if word == "COPY"] == ["--from=packages /opt/hubring /opt/hubring"]


def test_the_image_says_what_it_is() -> None:
    (labels,) = [rest for word, rest in last_stage() if word == "LABEL"]
    said = dict(word.split("=", 1) for word in shlex.split(labels))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert said["org.opencontainers.image.licenses"] == project["license"]
    assert said["org.opencontainers.image.description"] == project["description"]


def test_nothing_but_the_programs_goes_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = {
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == (sent - {"wheels"}) | {"wheel[s]"}
    assert all((ROOT / source).exists() for source in copied - {"wheel[s]"})
