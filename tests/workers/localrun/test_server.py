"""A server that does not start says why to whoever launched it."""

from __future__ import annotations

import pytest

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import ConfigError
from hubring.workers.localrun.server import Server


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [False, True])
def test_a_bad_flag_is_named_wherever_its_log_goes(verbose: bool) -> None:
    with pytest.raises(ConfigError, match=r"(?s)the server did not start:\n.*--mode foo: expected one"):
        Server(1, ["--mode", "foo"], environment(), verbose=verbose)
