"""Names, interfaces and ports: what the doctor says of them, and what it reads."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import psutil
import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.doctor import network
from hubring.ps.doctor.check import Subject
from hubring.ps.doctor.network import PortListener, WantedPort, find_listener
from hubring.ps.transport.host import refusal
from tests.ps.doctor.case import Case, fails, fine, judgements, only, warns
from tests.support.processes.process_tree import command

HERE = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": ""}
CONTROL = WantedPort("control port", 5555, "--port")

name, port, TAKEN = network.judge_own_name, network.judge_port, errno.EADDRINUSE
OURS = PortListener(7, "python /usr/bin/ps-server start")

CASES = [
    warns(
        name("node7", [], "not known", "10.0.0.7"), "node7: not known", "echo '10.0.0.7 node7' >> /etc/hosts"
    ),
    warns(name("node7", ["127.0.1.1"], "", "10.0.0.7"), "only this machine reaches", "map node7 to 10.0.0.7"),
    fine(name("node7", ["127.0.0.1"], "", "127.0.0.1"), "node7 is 127.0.0.1"),
    fine(network.judge_interfaces(HERE, "127.0.0.1", "10.0.0.7"), "only; other machines use eth0 10.0.0.7"),
    fine(port(CONTROL._replace(number=0), "127.0.0.1", 0, None), "the server picks a free port"),
    warns(
        port(CONTROL, "::1", TAKEN, PortListener(7, "nginx")),
        "[::1]:5555 is taken by pid 7 (nginx)",
        "--port 0",
    ),
    warns(port(CONTROL, "127.0.0.1", TAKEN, PortListener(None)), "that this user cannot see", "--port 0"),
    warns(port(CONTROL, "127.0.0.1", TAKEN, None), "in another network namespace", "--port 0"),
    fine(port(CONTROL, "127.0.0.1", TAKEN, OURS), "a ps-server uses 127.0.0.1:5555: pid 7"),
    fails(port(CONTROL, "10.0.0.9", errno.ENETDOWN, None), "10.0.0.9:5555: Network is down", "at least 1024"),
]


@judgements(CASES)
def test_each_finding_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:15B3 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
   1: 0100007F:15B3 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0
"""


def test_only_a_socket_that_listens_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert find_listener(22) == PortListener(None)
    assert find_listener(5556) is None
    assert find_listener(0xC001) is None
    for pid, target in (("12", "socket:[4712]"), ("13", "socket:[4711]")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd" / "3").symlink_to(target)
    assert find_listener(5555) == PortListener(13), "it ended before its command was read"


def test_this_process_is_found_where_it_listens_and_refuses_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = find_listener(port)
        assert refusal("127.0.0.1", port) == errno.EADDRINUSE
    assert found == PortListener(os.getpid(), command(os.getpid()))
    assert refusal("127.0.0.1", port) == 0
    assert refusal("192.0.2.77", 0) == errno.EADDRNOTAVAIL
    assert find_listener(port) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ServerConfig(), [5555, 5556]),
        (ServerConfig(port=7000, page_port=8080), [7000, 8080]),
        (ServerConfig(port=0), [0, 0]),
        (ServerConfig(no_page=True), [5555]),
    ],
)
def test_the_ports_are_those_that_a_server_would_take(config: ServerConfig, expected: list[int]) -> None:
    assert [port.number for port in network.wanted_ports(config)] == expected


def test_a_port_that_another_process_uses_is_told_with_that_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        *_, told = network.examine_ports(ServerConfig(port=0, page_port=port))
    assert (told.name, told.state) == ("page's port", "warning")
    assert f"127.0.0.1:{port} is taken by pid {os.getpid()}" in told.found
    assert told.fix == "run ps-server start --page-port 0, or stop that process"


def test_a_server_in_a_network_that_nothing_leads_to_ends_with_69() -> None:
    subject = Subject(ServerConfig(), None, "255.255.255.255:5555", {}, 1.0)
    told = only(network.examine_interfaces(subject, "127.0.0.1"))
    assert (told.state, told.exit_code) == ("failure", 69)
    assert "no route from this machine" in told.found
    assert "ip route get 255.255.255.255" in told.fix
