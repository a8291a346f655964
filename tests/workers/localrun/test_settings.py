"""Settings of ps-run reach the server or the workers, and are checked before either starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hubring.ps.config.environment import environment
from hubring.ps.config.sources import load_worker
from hubring.ps.core.errors import ConfigError
from hubring.workers.localrun.server import LocalServer
from hubring.workers.localrun.settings import settle
from hubring.workers.programs.ps_run import app


def test_each_setting_goes_where_it_belongs() -> None:
    given = {"mode": "ssp", "staleness": 2, "compress": "int8", "shards": None, "lease": 5.0}
    settings = settle(given, 2, {})
    assert settings.server == {"lease": 5.0, "mode": "ssp", "staleness": 2}
    assert settings.worker == {"compress": "int8"}
    assert (settings.mode, settings.topology) == ("ssp", "hub")


@pytest.mark.parametrize(
    ("where", "server"), [({"topology": "ring"}, {"shards": 0}), ({"aggregate": True}, {})]
)
def test_workers_that_step_save_the_checkpoints(where: dict[str, object], server: dict[str, object]) -> None:
    settings = settle({"checkpoint_dir": Path("saved"), **where}, 2, {})
    assert settings.server == server
    assert settings.worker == {"checkpoint_dir": Path("saved"), **where}
    assert settle({"checkpoint_dir": Path("saved")}, 2, {}).server == {"checkpoint_dir": Path("saved")}


@pytest.mark.parametrize("given", [{"mode": "asp"}, {"shards": 3}])
def test_a_ring_takes_no_setting_of_a_hub(given: dict[str, object]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=f"--{name} {value} is for a hub, but .* --topology ring; remove"):
        settle({"topology": "ring", **given}, 2, {})
    assert settle({"topology": "ring", "mode": "bsp", "shards": 0}, 2, {}).server["mode"] == "bsp"


def test_help_shows_the_defaults_of_ps_run_itself() -> None:
    words = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output.split())
    assert "1.5 leases for it to return [default: wait; elastic: drop]" in words
    assert "/metrics [default: a free port]" in words


def test_workers_read_settings_from_variables_too() -> None:
    variables = settle({"aggregate": True, "timeout": 9.0}, 2, {}).worker_variables
    config = load_worker({"server": "hub:1"}, environment=variables)
    assert (config.aggregate, config.timeout) == (True, 9.0)


RING = {"topology": "ring"}


@pytest.mark.parametrize(
    ("given", "variables", "told"),
    [
        ({}, {"PS_MODE": "async"}, "PS_MODE='async' in the environment: expected one of bsp, asp"),
        ({}, {"PS_STANDBY": "1"}, "Unset PS_STANDBY, or use ps-server start --standby 1"),
        (RING, {"PS_COLOCATE": "1"}, "PS_COLOCATE=1 is for a hub, but the job has --topology ring"),
        ({**RING, "aggregate": True}, {}, "--aggregate requires --topology hub"),
    ],
)
def test_an_invalid_setting_is_named(given: dict[str, object], variables: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settle(given, 2, variables)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.parametrize("verbose", [False, True])
def test_a_server_that_refuses_its_settings_is_quoted(verbose: bool) -> None:
    with pytest.raises(ConfigError, match=r"(?s)the server did not start:\n.*--mode foo: expected one"):
        LocalServer(1, ["--mode", "foo"], environment(), verbose=verbose)
