"""What a server prints for people: its banner, and the status of the job, its workers and its shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hubring.ps.config.server import ServerConfig
from hubring.ps.observe.banner import banner
from hubring.ps.observe.status_table import render, watch
from tests.support.pages.status_hub import report, shard, worker


def shown(*shards: dict[str, Any], **changes: Any) -> list[str]:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(render({**report(2, **changes), "shards": list(shards)}))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_job_its_workers_and_its_shards_are_shown() -> None:
    other = worker(1, loss=None, seconds_waiting=3.0, samples=640, samples_per_second=64.0)
    lines = shown(shard(0), workers=[worker(0), other])
    assert lines[:4] == [
        "job      train.py (hub, bsp): running",
        "step     40",
        "up       100 s, Hubring 0.1.0",
        "saved    no checkpoint",
    ]
    speeds = ["step", "steps/s", "samples/s", "loss"]
    assert lines[4].split() == ["rank", "host", "pid", *speeds, "GB", "waiting", "heartbeat"]
    assert lines[5].split() == ["0", "node1", "1000", "40", "2", "-", "0.5", "0.4", "-", "0.3", "s", "ago"]
    assert lines[6].split()[3:] == ["40", "2", "64", "-", "0.4", "3.0", "s", "0.3", "s", "ago"]
    assert lines[8].split() == ["0", "node0", "2000", "12", "40", "160", "4.0", "5.0", "0.2", "s", "ago"]


def test_a_server_without_a_job_and_what_was_lost_are_shown() -> None:
    ended = {"finished": [], "preempted": [], "failed": {}, "lost": {"1": "silent for 4.2 s [at] step 3"}}
    waiting = {"job": "", "topology": "", "state": "waiting for the first worker", "workers": []}
    lines = shown(**waiting, ended=ended)
    assert lines[0] == "job      -: waiting for the first worker"
    assert lines[-1] == "rank 1 lost: silent for 4.2 s [at] step 3"


def test_progress_and_how_to_replace_a_worker_are_shown() -> None:
    command = "ps-worker --server 127.0.0.1:5555 --rank 1 train.py"
    lines = shown(progress=0.42, seconds_left=83.4, replace={"1": command})
    assert lines[1] == "step     40, 42% done, about 83 s left"
    assert lines[-1] == f"replace rank 1 with: {command}"


def test_a_shard_that_does_not_answer_says_so() -> None:
    assert "does not answer" in shown(shard(0, error="it does not answer"))[-1]


def test_a_watched_status_is_refreshed_until_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter([None, None])

    def sleep(seconds: float) -> None:
        if next(left, seconds):
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setenv("FORCE_COLOR", "1")
    steps = iter([40, 41, 42])
    watch(lambda: {**report(2, step=next(steps)), "shards": []})
    said = capsys.readouterr().out
    assert [f"step     {step}" in said for step in (40, 41, 42)] == [True, True, True]
    assert "\x1b[1A" in said, "in place"


TOKENS = Path("/run/tokens")


def banner_of(config: ServerConfig) -> str:
    return banner(config, "here:5555", None if config.insecure else TOKENS, [], "")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_no_other_host_reaches_a_server_on_loopback(host: str) -> None:
    line = "in /run/tokens; other users of this host need a copy. For workers on other hosts, use --host"
    assert line in banner_of(ServerConfig(host=host))
    assert "--token-file" not in banner_of(ServerConfig(host=host))


def test_workers_on_other_hosts_need_a_copy() -> None:
    said = banner_of(ServerConfig(host="node1"))
    assert "in /run/tokens; workers on other hosts need a COPY of it" in said
    assert said.count("ps-worker --server here:5555 --token-file COPY") == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "node1"])
def test_commands_on_this_host_name_the_file_of_tokens_that_the_user_chose(host: str) -> None:
    said = banner_of(ServerConfig(host=host, token_file=Path("hub.tokens")))
    assert "  status    ps-server status here:5555 --token-file hub.tokens\n" in said
    copy = "hub.tokens" if host == "127.0.0.1" else "COPY"
    assert said.count(f"ps-worker --server here:5555 --token-file {copy}") == 2


def test_a_server_without_shards_names_no_hub() -> None:
    said = banner_of(ServerConfig(shards=0, workers=2))
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["ring", "status", "tokens"]
    assert "ps-worker --server here:5555 --topology ring   # x 2 workers\n" in said


def test_plain_data_is_announced_where_it_counts() -> None:
    line = "data      gradients over ZeroMQ are not encrypted (--plain-data)"
    assert line in banner_of(ServerConfig(host="node1", plain_data=True))
    for config in (
        ServerConfig(host="node1"),
        ServerConfig(plain_data=True),
        ServerConfig(host="node1", plain_data=True, insecure=True),
    ):
        assert "ZeroMQ" not in banner_of(config)
