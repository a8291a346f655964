"""After whose end the shards of a host that joined a server go on."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hubring.ps.core.errors import ConfigError, Fenced, ServerUnreachable
from hubring.ps.process.child import Adopted, Process
from hubring.ps.shard import host_shards
from hubring.ps.shard.host_shards import _SHARD, _STANDBY, began_as_standby

SERVER_ENDED, SERVER_LOST = 0, ServerUnreachable.exit_code
CRASHED, REFUSED, GIVEN_UP = 1, ConfigError.exit_code, Fenced.exit_code


class Ended:
    def __init__(self, name: str, code: int) -> None:
        self.name, self.code = name, code


@pytest.mark.parametrize(
    ("name", "code", "goes_on"),
    [
        (_SHARD, -signal.SIGKILL, True),
        (_SHARD, GIVEN_UP, True),
        (_SHARD, SERVER_ENDED, False),
        (_SHARD, SERVER_LOST, False),
        (_SHARD, REFUSED, False),
        (_STANDBY, -signal.SIGKILL, True),
        (_STANDBY, GIVEN_UP, True),
        (_STANDBY, CRASHED, True),
        (_STANDBY, REFUSED, True),
        (_STANDBY, SERVER_ENDED, False),
        (_STANDBY, SERVER_LOST, False),
    ],
)
def test_a_host_goes_on_without_a_standby_until_its_server_ends(name: str, code: int, goes_on: bool) -> None:
    ended: Any = Ended(name, code)
    assert host_shards._may_be_replaced(ended) == goes_on


def test_a_process_keeps_its_kind_when_another_coordinator_adopts_it() -> None:
    gone = Process(2**22, 0)
    assert [began_as_standby(Adopted(name, gone)) for name in (_SHARD, _STANDBY)] == [False, True]
