"""A job as settings, and how it is handed to an engine's program."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hubring.ps.core.errors import ConfigError, EngineMissing
from hubring.ps.security import private_file, token_file
from hubring.ps.security.guard import Role
from hubring.ps.security.keyring import Keyring
from hubring.ps.submit import containers
from hubring.ps.submit.engine import ENGINES, Engine, send
from tests.support.submissions import IMAGE, job, program


def refusal(**flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        job(**flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ({"workers": 3}, (3, None, 1)),
        ({"workers": 4, "nodes": 2}, (4, 2, 2)),
        ({"nodes": 2, "gpus": 4}, (8, 2, 4)),
        ({"workers": 8, "gpus": 4}, (8, 2, 4)),
        ({"gpus": 4}, (4, 1, 4)),
        ({"workers": 8, "nodes": 2, "gpus": 4}, (8, 2, 4)),
    ],
)
def test_workers_nodes_and_gpus_follow_from_one_another(
    flags: dict[str, Any], layout: tuple[int, int | None, int]
) -> None:
    found = job(**flags)
    assert (found.workers, found.nodes, found.per_node) == layout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, ["--workers N is missing"]),
        ({"workers": 5, "nodes": 2}, ["--workers 5", "--nodes 2"]),
        ({"workers": 6, "nodes": 2, "gpus": 4}, ["makes 8 workers", "--workers is 6"]),
        ({"workers": 6, "gpus": 4}, ["--workers 6", "--gpus 4"]),
        ({"workers": 2, "image": IMAGE}, ["--image", "kubernetes or compose", "--engine slurm"]),
        ({"workers": 2, "kind": "trainjob"}, ["--kind trainjob", "--engine kubernetes"]),
        ({"workers": 2, "engine": None}, ["slurm, kubernetes or compose"]),
        ({"workers": 2, "engine": "slrum"}, ["--engine slrum", "one of slurm, kubernetes, compose"]),
        ({"workers": 2, "engine": "compose"}, ["--engine compose needs --image"]),
        (
            {"workers": 2, "engine": "compose", "image": IMAGE, "requeue": True},
            ["--requeue requires", "slurm or"],
        ),
        (
            {"workers": 2, "engine": "compose", "image": IMAGE, "nodes": 2},
            ["--nodes 2", "slurm or kubernetes"],
        ),
        ({"workers": 8, "engine": "compose", "image": IMAGE, "gpus": 4}, ["one machine", "--workers is 8"]),
        ({"workers": 2, "engine": "compose", "image": "a b"}, ["--image a b", "registry.example"]),
        ({"workers": 2, "job_name": "Mine"}, ["--job-name Mine", "lower-case letters"]),
        ({"workers": 2, "job_name": "a\n"}, ["lower-case letters"]),
        ({"workers": 2, "job_name": "a" * 41}, ["at most 40"]),
        ({"workers": 2, "partition": "all; rm -rf ."}, ["names of partitions"]),
        ({"workers": 2, "time": "90"}, ["--time 90", "[DAYS-]HOURS:MINUTES:SECONDS"]),
        ({"workers": 2, "time": "0:00:00"}, ["[DAYS-]HOURS:MINUTES:SECONDS"]),
        ({"workers": 2, "engine_option": ["reboot"]}, ["one line that begins with #SBATCH --"]),
        ({"workers": 2, "engine_option": ["#SBATCH --mem=1\nreboot"]}, ["one line that begins with"]),
        ({"workers": 2, "mode": "sync"}, ["--mode sync", "bsp, asp, ssp, backup"]),
        ({"workers": 2, "topology": "ring", "mode": "asp"}, ["--mode asp", "--topology hub"]),
        ({"workers": 2, "topology": "ring", "colocate": True}, ["--colocate requires", "--topology hub"]),
        ({"workers": 2, "aggregate": True, "mode": "asp"}, ["--aggregate", "--mode asp"]),
        ({"workers": 2, "local": True, "mode": "asp"}, ["--local requires --mode bsp", "--mode asp"]),
    ],
)
def test_a_contradiction_is_refused_in_words(flags: dict[str, Any], words: list[str]) -> None:
    said = refusal(**flags)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("server", 'host = "node1"'),
        ("server", "workers = 3"),
        ("server", "insecure = true"),
        ("server", 'token_file = "tokens"'),
        ("server", 'tls_ca = "ca.pem"'),
        ("server", 'join = "hub:1"'),
        ("worker", "rank = 0"),
        ("worker", 'server = "hub:1"'),
        ("worker", 'token_file = "tokens"'),
        ("worker", 'tls_ca = "ca.pem"'),
    ],
)
def test_a_setting_of_the_engine_cannot_be_set_in_a_file(tmp_path: Path, table: str, line: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"[{table}]\n{line}\n")
    with pytest.raises(ConfigError, match="derives this setting from the engine") as caught:
        job(file=file, workers=2)
    assert str(file) in str(caught.value)


def test_a_server_of_the_shells_environment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="PS_SERVER='hub:1' in the environment"):
        job(workers=2, variables={"PS_SERVER": "hub:1"})


def test_settings_come_from_flags_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        '[submit]\nworkers = 2\npartition = "short"\n[server]\nlease = 9\nshards = 3\n[worker]\ntimeout = 7\n'
    )
    found = job(
        file=file, shards=2, variables={"PS_GPUS": "2", "PS_PARTITION": "long", "PS_COMPRESS": "int8"}
    )
    assert (found.workers, found.nodes, found.config.partition) == (2, 1, "long")
    assert found.server_words == ["--shards", "2", "--workers", "2", "--once", "--lease", "9.0"]
    assert found.worker_words == ["--compress", "int8", "--timeout", "7.0"]


@pytest.mark.parametrize(
    ("flags", "servers", "workers"),
    [
        ({}, (Path("kept"),), ()),
        ({"topology": "ring"}, (), (Path("kept"),)),
        ({"aggregate": True}, (), (Path("kept"),)),
        ({"colocate": True}, (Path("kept"),), (Path("kept"),)),
    ],
)
def test_checkpoints_are_for_the_one_who_keeps_the_parameters(
    flags: dict[str, Any], servers: tuple[Path, ...], workers: tuple[Path, ...]
) -> None:
    said = {"PS_CHECKPOINT_DIR": "kept", "PS_CHECKPOINT_EVERY": "60"}
    both: list[dict[str, Any]] = [{"checkpoint_dir": Path("kept")}, {"variables": said}]
    for given in both:
        found = job(workers=2, **given, **flags)
        assert (found.servers_folders, found.workers_folders) == (servers, workers)


def test_time_is_counted_in_seconds() -> None:
    assert job(workers=1).seconds is None
    assert job(workers=1, time="0:01:30").seconds == 90
    assert job(workers=1, time="2-03:00:01").seconds == 2 * 86400 + 3 * 3600 + 1


def test_an_argument_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not UTF-8"):
        job("train.py", "\udcff", workers=1)


def engine(line: str) -> Engine:
    """An engine whose program is a line of Python."""
    return Engine((sys.executable, "-c", line), "write it", render=lambda _: "")


def test_the_program_gets_the_job_and_its_exit_code_and_words_come_back(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    line = "import sys; print('job of', len(sys.stdin.read())); print('queued'); sys.exit(3)"
    answer = send(engine(line), "x" * 100_000)
    assert answer == (3, "queued")
    assert capfdbinary.readouterr().out == b"job of 100000\nqueued\n"


def test_a_program_that_reads_nothing_and_dies_is_told_by_its_signal() -> None:
    line = "import os, signal; os.close(0); os.kill(os.getpid(), signal.SIGKILL)"
    assert send(engine(line), "x" * 100_000) == (128 + signal.SIGKILL, "")


def test_signals_go_to_the_program() -> None:
    before = signal.getsignal(signal.SIGTERM)
    line = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM)\n"
        "signal.pause()\n"
    )
    assert send(engine(line), "") == (75, "")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("name", ENGINES)
def test_a_missing_program_is_named_with_its_fix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineMissing, match=ENGINES[name].command[0]) as caught:
        send(ENGINES[name], "")
    assert ENGINES[name].fix in str(caught.value)
    assert caught.value.exit_code == 69


def test_a_dry_run_prints_what_the_engine_reads_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert program("--engine", "slurm", "--workers", "2", "--dry-run", "--", "train.py", "--epochs", "3") == 0
    out = capsys.readouterr().out
    assert out == ENGINES["slurm"].render(job("train.py", "--epochs", "3", workers=2))


def test_only_the_engine_sees_the_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the job mounts is what the engine gets in front of it, and a dry run prints none of it."""
    kubectl, applied = tmp_path / "kubectl", tmp_path / "applied"
    kubectl.write_text(f"#!/bin/sh\ncat > {applied}\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["--engine", "kubernetes", "--workers", "2", "--image", IMAGE]
    assert program(*words, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert program(*words) == 0
    secret, *rest = yaml.safe_load_all(applied.read_text())
    assert rest == list(yaml.safe_load_all(printed))
    assert (secret["kind"], secret["immutable"]) == ("Secret", True)
    assert not any(text.strip() in printed for text in secret["stringData"].values())
    assert "kubectl create secret generic hubring-tokens" in printed


def test_the_workers_token_is_theirs_alone_and_fits_the_servers(tmp_path: Path) -> None:
    found = containers.new_secret(job(engine="kubernetes", image=IMAGE, workers=2))["stringData"]
    for name, text in found.items():
        private_file.write(tmp_path / name, text)
    ring = Keyring(tmp_path / containers.TOKENS_ENTRY)
    assert token_file.read_tokens(tmp_path / containers.WORKER_ENTRY) == {
        Role.WORKER: ring.tokens[Role.WORKER]
    }
    assert ring.identity is not None
    assert containers.new_secret(job(engine="kubernetes", image=IMAGE, workers=2))["stringData"] != found


def test_a_job_that_is_handed_over_ends_in_a_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\ncat > /dev/null\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert program("--engine", "slurm", "--workers", "2", "train.py") == 0
    said, last = capsys.readouterr().out.splitlines()
    assert said == "Submitted batch job 7"
    assert json.loads(last) == {
        "engine": "slurm",
        "job": "hubring",
        "command": "sbatch",
        "said": said,
        "exit_code": 0,
    }
