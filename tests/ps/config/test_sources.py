"""Settings from flags, environment and file: which one counts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.sources import load_server, load_worker
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        '[server]\nport = 1\nshards = 2\nlease = 3\ncheckpoint_dir = "kept"\n[worker]\ntimeout = 9.5\n'
    )
    return path


SERVICE_LINKS = {
    "PS_PORT": "tcp://10.0.0.1:5555",
    "PS_PORT_5555_TCP_ADDR": "10.0.0.1",
    "PS_SERVER_PORT": "tcp://10.0.0.1:5555",
    "PS_SERVER_SERVICE_HOST": "10.0.0.1",
    "PS_SERVER_SERVICE_PORT_GRPC": "5555",
}
"""What Kubernetes sets for services of those names."""


@pytest.mark.parametrize("variables", [{}, {"PS_SERVER": "hub:5555"}, SERVICE_LINKS])
def test_without_settings_of_its_own_a_server_has_the_defaults(variables: dict[str, str]) -> None:
    assert load_server({}, environment=variables) == ServerConfig()


def test_without_settings_a_worker_has_the_defaults() -> None:
    assert load_worker({}, environment={}) == WorkerConfig()


def test_flags_beat_environment_beats_file_beats_defaults(settings: Path) -> None:
    config = load_server({"port": 4}, settings, {"PS_PORT": "3", "PS_SHARDS": "5"})
    assert (config.port, config.shards, config.lease, config.backup) == (4, 5, 3.0, 0)


def test_environment_names_the_file_where_no_flag_does(settings: Path) -> None:
    assert load_worker({}, environment={"PS_CONFIG": str(settings)}).timeout == 9.5


@pytest.mark.parametrize("given", ["kept", Path("kept")])
def test_paths_come_as_paths(settings: Path, given: object) -> None:
    assert load_server({"checkpoint_dir": given}, environment={}).checkpoint_dir == Path("kept")
    assert load_server({}, settings, {}).checkpoint_dir == Path("kept")


@pytest.mark.parametrize(("text", "meant"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_switch_in_the_environment_is_true_or_false(text: str, meant: bool) -> None:
    assert load_server({}, environment={"PS_ONCE": text}).once is meant


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PS_PORT": "abc"}, ["PS_PORT='abc' in the environment", "a port from 0 to 65535"]),
        ({"PS_PORT": "65536"}, ["PS_PORT='65536' in the environment", "a port from 0 to 65535"]),
        ({"PS_SHARDS": "-1"}, ["PS_SHARDS='-1'", "at least 0"]),
        ({"PS_LEASE": "nan"}, ["PS_LEASE='nan'", "seconds, above 0"]),
        ({"PS_LEASE": "inf"}, ["PS_LEASE='inf'", "at most 1e7"]),
        ({"PS_ONCE": "maybe"}, ["PS_ONCE='maybe'", "true or false"]),
        ({"PS_SERVER": ""}, ["PS_SERVER in the environment is empty", "unset it"]),
        ({"PS_QQQQ": "1"}, ["PS_QQQQ in the environment", "valid names: PS_ACCELERATOR, PS_ADDRESS_FILE"]),
    ],
)
def test_bad_variable_is_named_with_what_was_allowed(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_server({}, environment=variables)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nport = '80'", ["port = '80' in", "[server]: expected a port"]),
        ("[server]\ncheckpoint_dir = 3", ["checkpoint_dir = 3 in", "expected a path"]),
        ("[server]\ncheckpoint-dir = 'a'", ["checkpoint-dir in", "did you mean checkpoint_dir?"]),
        ("[worker]\nbackends = 'gloo'", ["backends in", "[worker]", "did you mean backend?"]),
        ("[sever]\nport = 80", ["[sever] in", "did you mean server?"]),
        ("server = 80", ["server = 80 in", "expected a table, [server]"]),
    ],
)
def test_bad_file_is_named_with_what_was_allowed(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_server({}, path, {})
    assert [word for word in [*words, str(path)] if word not in str(caught.value)] == []


def test_missing_file_is_an_error_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        load_server({}, tmp_path / "absent.toml", {})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": 70000}, "--port 70000: expected a port from 0 to 65535"),
        ({"mode": "sync"}, "--mode sync: expected one of bsp, asp, ssp, backup"),
        ({"backup": 1, "mode": "asp"}, "--backup 1 requires --mode backup, not --mode asp"),
        ({"mode": "backup"}, "--mode backup needs --backup B"),
        (
            {"mode": "backup", "backup": 2, "workers": 2},
            "leaves no worker to wait for; use at most --backup 1",
        ),
        ({"workers": 4097}, "use at most --workers 4096"),
        ({"insecure": True, "token_file": Path("t")}, "--token-file t lets in clients with a token"),
        ({"insecure": True, "tls_ca": Path("c")}, "--tls-ca are for encryption; --insecure encrypts nothing"),
        ({"tls_cert": Path("c")}, "--tls-cert c needs --tls-key FILE"),
        ({"tls_key": Path("k")}, "--tls-key k needs --tls-cert FILE"),
        ({"standby": 2}, "--standby 2 is too many; use --standby 1"),
        ({"join": "hub"}, "address 'hub': expected HOST:PORT"),
        ({"join": "hub:1"}, "cannot be reached from hub:1; set --host"),
        ({"join": "hub:1", "workers": 2}, "--workers is a setting of the coordinator.*the one at hub:1"),
        ({"colocate": True, "shards": 2}, "--shards 2 starts shards on this host.*remove one"),
        ({"colocate": True, "await_shards": 2}, "--await-shards 2 waits for shards on other.*remove one"),
        ({"join": "127.0.0.1:1", "shards": 0}, "--shards 0 adds no shards to the hub at 127.0.0.1:1"),
        ({"join": "127.0.0.1:1", "await_shards": 1}, "--await-shards is a setting of the coordinator"),
        ({"join": "hub:1", "colocate": True}, "--colocate is a setting of the coordinator"),
        ({"join": "hub:1", "mode": "asp"}, "--mode is a setting of the coordinator"),
        ({"join": "hub:1", "checkpoint_dir": "kept"}, "--checkpoint-dir is a setting of the coordinator"),
        ({"join": "127.0.0.1:1", "page_port": 8080}, "--page-port is a setting of the coordinator"),
        ({"no_page": True, "page_port": 8080}, "--page-port 8080 configures the status page"),
        ({"no_page": True, "page_token_file": Path("t")}, "--page-token-file t configures the status page"),
        ({"port": 5555, "page_port": 5555}, "--page-port 5555 is also the control port"),
        ({"port": 65535}, "set --page-port too"),
        ({"page_port": 70000}, "a port from 0 to 65535"),
        ({"colocate": True, "device": "cuda"}, "--device cuda applies to shards on this host"),
        *(
            ({"device": name}, "--device.*expected cpu, cuda or cuda:N")
            for name in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA")
        ),
    ],
)
def test_server_refuses_what_cannot_be(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_server(flags, environment={})


@pytest.mark.parametrize(
    "flags",
    [
        {"host": "127.0.0.2"},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "0.0.0.0", "insecure": True},
        {"mode": "ssp", "staleness": 0},
        {"mode": "backup", "backup": 1, "workers": 2},
        {"colocate": True, "shards": 1, "mode": "backup", "backup": 1, "on_loss": "wait"},
        {"shards": 0, "await_shards": 2},
        {"shards": 1, "await_shards": 1},
        {"join": "127.0.0.1:1", "shards": 3, "log_format": "json"},
        {"join": "hub:1", "host": "10.0.0.1", "insecure": True},
    ],
)
def test_server_takes_what_goes_together(flags: dict[str, object]) -> None:
    config = load_server(flags, environment={})
    assert {name: getattr(config, name) for name in flags} == flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"topology": "ring"}, "--topology ring needs --server"),
        ({"world_size": 2}, "--world-size 2 needs --server"),
        ({"server": "hub:1", "topology": "ring", "aggregate": True}, "--aggregate requires --topology hub"),
        (
            {"server": "hub:1", "topology": "ring", "transport": "shm"},
            "--transport shm requires --topology hub",
        ),
        ({"server": "hub:1", "backend": "nccl"}, "--backend nccl requires --topology ring"),
        (
            {"server": "hub:1", "rank": 2, "world_size": 2},
            "--rank 2 is outside --world-size 2; ranks go from 0",
        ),
        ({"server": "hub:1", "min_workers": 2}, "--min-workers 2 is for --topology ring"),
        (
            {"server": "hub:1", "topology": "ring", "min_workers": 2, "compress": "int8"},
            "--compress int8 keeps a residual of every step",
        ),
        ({"local": True}, "--local needs --server HOST:PORT and more than one worker"),
        ({"server": "h:1", "world_size": 1, "local": True}, "--local needs --server"),
        (
            {"server": "h:1", "aggregate": True, "compress": "powersgd:4", "local": True},
            "--local on a hub cannot add what --compress powersgd:4 sends",
        ),
        (
            {"server": "h:1", "topology": "ring", "backend": "nccl", "local": True},
            "--local with --backend nccl is not built yet",
        ),
        (
            {"server": "h:1", "topology": "ring", "backend": "shm", "local": True},
            "--local is for workers on several hosts",
        ),
        ({"rank": -1}, "--rank -1: expected a whole number, at least 0"),
        ({"compress": "zip"}, "compression 'zip'"),
        ({"server": "h:1", "compress": "powersgd:4"}, "add --aggregate"),  # on a hub
        (
            {"server": "h:1", "topology": "ring", "backend": "nccl", "compress": "bf16"},
            "--compress bf16 requires --backend gloo, not --backend nccl",
        ),
    ],
)
def test_worker_refuses_what_cannot_be(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_worker(flags, environment={})


@pytest.mark.parametrize(
    "flags",
    [
        {"server": "hub:1", "topology": "ring", "backend": "nccl", "rank": 1, "world_size": 2},
        {"server": "h:1", "compress": "powersgd:4", "aggregate": True},
        {"server": "h:1", "compress": "powersgd:4", "topology": "ring"},
        {"server": "h:1", "topology": "ring", "backend": "gloo", "local": True},
        {"server": "h:1", "world_size": 2, "local": True},
    ],
)
def test_worker_takes_what_goes_together(flags: dict[str, object]) -> None:
    config = load_worker(flags, environment={})
    assert {name: getattr(config, name) for name in flags} == flags
