"""The Compose file on a real engine: hub and ring train to their end, workers die, a second start resumes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.deploy.conftest import Yard
from tests.deploy.fleet import Container, Fleet, results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
Fleets = Callable[..., Fleet]
STEPS = 22
"""Of an epoch: 1437 images in batches of 64."""
FOUR = [0, 1, 2, 3]


def code(container: Container) -> int:
    found: int = container["State"]["ExitCode"]
    return found


def test_four_workers_train_through_the_hub_and_all_ends_with_the_result_on_standard_output(
    fleet: Fleets,
) -> None:
    demo = fleet(WORKERS="4")
    ended = demo.ask("up", "--no-color", "--exit-code-from", "server")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (server,) = demo.containers("server")
    summary = demo.result(server)
    assert summary in results(ended.stdout)
    assert (summary["finished"], summary["lost"], summary["failed"]) == (FOUR, {}, {})
    assert (summary["steps"], summary["exit_code"]) == (20 * STEPS, 0)
    assert summary["checkpoint"].startswith("/checkpoints/")
    assert [shard["pushes"] > 0 for shard in summary["shards"]] == [True, True]
    told = [demo.result(worker) for worker in demo.containers("worker")]
    assert sorted(one["rank"] for one in told) == FOUR
    (first,) = [one for one in told if one["rank"] == 0]
    assert first["metrics"]["test_accuracy"] > 0.9
    assert [one["exit_code"] for one in told] == [0] * 4
    # Compose stops them all once one has ended, and who is on its way out by then ends well all the same.
    assert [code(one) for one in (*demo.containers("worker"), *demo.containers("shard"))] == [0] * 6


def test_four_workers_train_around_the_ring(fleet: Fleets) -> None:
    demo = fleet(WORKERS="4")
    # Compose shows what the services print that are named.
    words = ["up", "--no-color", "--exit-code-from", "ring-server", "ring-server", "ring"]
    ended = demo.ask("--profile", "ring", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (server,) = demo.containers("ring-server")
    summary = demo.result(server)
    assert summary in results(ended.stdout)
    assert (summary["finished"], summary["steps"]) == (FOUR, 20 * STEPS)
    told = [demo.result(worker) for worker in demo.containers("ring")]
    assert {one["topology"] for one in told} == {"ring"}
    (first,) = [one for one in told if one["rank"] == 0]
    assert first["metrics"]["test_accuracy"] > 0.9
    assert demo.containers("worker") == []


def test_training_goes_on_without_a_worker_and_a_second_start_resumes_from_the_volume(fleet: Fleets) -> None:
    demo = fleet(WORKERS="4", EPOCHS="60")
    demo.run("up", "--no-color", "--detach", "--scale", "worker=5")
    demo.until(lambda: demo.status().get("step", 0) >= 10, "ten steps")

    demo.until(lambda: bool(_ended(demo, "worker")), "end of the worker that was too many")
    (extra,) = _ended(demo, "worker")
    assert code(extra) == 78
    assert "no rank is free; the job has 4 of 4 workers: " in demo.result(extra)["error"]

    killed = next(one for one in demo.containers("worker") if one["Id"] != extra["Id"])
    demo.kill(killed)
    demo.until(lambda: len(demo.status().get("workers", [])) == 3, "news of the worker's loss")
    before = demo.status().get("step", 0)
    demo.until(lambda: demo.status().get("step", 0) > before, "a step without it")

    demo.run("stop")
    (server,) = demo.containers("server")
    stopped = demo.result(server)
    assert (stopped["exit_code"], code(server)) == (75, 75), demo.said("server")
    assert (len(stopped["preempted"]), len(stopped["lost"])) == (3, 1)
    assert before < stopped["steps"] < 60 * STEPS
    assert stopped["checkpoint"].endswith(f"-step-{stopped['steps']}")
    assert [code(shard) for shard in demo.containers("shard")] == [0, 0]

    ended = demo.ask("up", "--no-color", "--exit-code-from", "server")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"resumes   step {stopped['steps']} of job" in ended.stdout + ended.stderr
    (server,) = demo.containers("server")
    summary = demo.result(server)
    assert (summary["finished"], summary["steps"]) == (FOUR, 60 * STEPS)


def _ended(demo: Fleet, service: str) -> list[Container]:
    return [one for one in demo.containers(service) if one["State"]["Status"] == "exited"]


def test_a_container_is_as_closed_as_the_recipe_says(fleet: Fleets) -> None:
    demo = fleet(WORKERS="2")
    demo.run("up", "--no-color", "--detach", "server")  # which trains nothing while nobody comes
    demo.until(lambda: bool(demo.status()), "server")
    (server,) = demo.containers("server")
    assert server["Config"]["User"] == "10001:10001"
    host = server["HostConfig"]
    assert (host["ReadonlyRootfs"], host["CapDrop"]) == (True, ["ALL"])
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert (host["Memory"], host["ShmSize"]) == (512 << 20, 64 << 20)
    assert demo.run("port", "server", "5556").strip() == "127.0.0.1:5556"
    status = demo.run("exec", "-T", "server", "cat", "/proc/self/status")
    said = dict(line.split(":\t", 1) for line in status.splitlines())
    assert said["Uid"].split() == ["10001"] * 4
    assert (int(said["CapEff"], 16), said["NoNewPrivs"]) == (0, "1")
    stranger = ["env", "-u", "PS_TOKEN_FILE", "ps-server", "status", "127.0.0.1:5555"]
    assert "it has no token" in demo.ask("exec", "-T", "server", *stranger).stderr
    modes = demo.run("exec", "-T", "server", "stat", "-c", "%a %u", "/run/hubring", "/run/hubring/tokens")
    assert modes.split() == ["700", "10001", "600", "10001"]
    refused = demo.ask("exec", "-T", "server", "touch", "/opt/hubring/written")
    assert "Read-only file system" in refused.stderr
    assert [network["Internal"] for network in demo.networks("shard")] == [True]
    assert sorted(network["Internal"] for network in demo.networks("server")) == [False, True]


def test_the_image_has_no_compiler_no_pip_and_no_cache(yard: Yard) -> None:
    plain = ["run", "--rm", "--network", "none", "--read-only"]
    tools = "for tool in gcc cc g++ make pip pip3; do ! command -v $tool || exit 1; done; id -u"
    assert yard.engine.run(*plain, "hubring:test", "sh", "-c", tools).strip() == "10001"
    look = "find /root /opt /var/cache '(' -name '*.whl' -o -path '*pip*' -name 'http*' ')'"
    assert yard.engine.run(*plain, "--user", "0", "hubring:test", "sh", "-c", look) == ""
    (found,) = json.loads(yard.engine.run("image", "inspect", "hubring:test"))
    assert not found["Config"]["Entrypoint"]
    assert found["Config"]["Labels"]["org.opencontainers.image.title"] == "Hubring"
