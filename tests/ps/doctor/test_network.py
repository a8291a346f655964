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
from hubring.ps.doctor.network import Answer, Listener, Port, find_listener
from hubring.ps.transport.host import refusal
from tests.ps.doctor.case import Case, judgements, only
from tests.support.processes.process_tree import command

HERE = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": ""}
CONTROL = Port("control port", 5555, "--port")
NAMED = Answer("node7", ["10.0.0.7"])

CASES = [
    Case(network.judge_own_name(NAMED, [], "10.0.0.7"), "ok", "node7 is 10.0.0.7"),
    Case(
        network.judge_own_name(Answer("node7", [], "Name or service not known"), [], "10.0.0.7"),
        "warning",
        "node7: Name or service not known",
        "echo '10.0.0.7 node7' >> /etc/hosts",
    ),
    Case(
        network.judge_own_name(Answer("node7", ["127.0.1.1"]), [], "10.0.0.7"),
        "warning",
        "node7 is 127.0.1.1, which only this machine reaches",
        "map node7 to 10.0.0.7 in /etc/hosts",
    ),
    Case(network.judge_own_name(Answer("node7", ["127.0.0.1"]), [], "127.0.0.1"), "ok", "node7 is 127.0.0.1"),
    Case(
        network.judge_own_name(Answer("node7", ["10.0.0.9"]), ["10.0.0.9"], "10.0.0.7"),
        "failure",
        "10.0.0.9 is not an address of this machine: the name leads to another machine",
        "ps-server start --host 10.0.0.7",
    ),
    Case(
        network.judge_own_name(NAMED._replace(seconds=5.2), [], "10.0.0.7"),
        "warning",
        "the lookup took 5.2 s",
        "/etc/resolv.conf",
    ),
    Case(network.judge_server_name(Answer("hub1", ["10.0.0.1"]), here=False), "ok", "hub1 is 10.0.0.1"),
    Case(network.judge_server_name(Answer("::1", ["::1"]), here=True), "ok", "::1 is an address"),
    Case(
        network.judge_server_name(Answer("hub1", [], "Name or service not known"), here=False),
        "failure",
        "hub1: Name or service not known",
        "check the spelling",
    ),
    Case(
        network.judge_server_name(Answer("hub1", ["127.0.1.1"]), here=False),
        "warning",
        "hub1 is 127.0.1.1, which is this machine",
        "correct /etc/hosts",
    ),
    Case(network.judge_server_name(Answer("node7", ["127.0.1.1"]), here=True), "ok", "node7 is 127.0.1.1"),
    Case(network.judge_interfaces(HERE, "10.0.0.7", "10.0.0.7"), "ok", "a ring uses eth0 10.0.0.7"),
    Case(
        network.judge_interfaces(HERE, "127.0.0.1", "10.0.0.7"),
        "ok",
        "lo 127.0.0.1, for workers on this machine only; other machines use eth0 10.0.0.7",
    ),
    Case(
        network.judge_no_route("hub1", "no route from this machine to 'hub1'"),
        "failure",
        "hub1",
        "ip route get",
    ),
    Case(
        only(network.judge_chosen(HERE, "eth7", None)),
        "warning",
        "names an interface that does not exist; there are lo 127.0.0.1, eth0 10.0.0.7",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    Case(
        only(network.judge_chosen(HERE, "eth0", "=eth1")),
        "failure",
        "NCCL_SOCKET_IFNAME='=eth1' matches no interface",
        "export NCCL_SOCKET_IFNAME=eth0, or unset NCCL_SOCKET_IFNAME",
    ),
    Case(network.judge_port(CONTROL, "127.0.0.1", 0, None), "ok", "127.0.0.1:5555 is free"),
    Case(
        network.judge_port(CONTROL._replace(number=0), "127.0.0.1", 0, None),
        "ok",
        "the server picks a free port",
    ),
    Case(
        network.judge_port(CONTROL, "::1", errno.EADDRINUSE, Listener(7, "/usr/sbin/nginx -g")),
        "warning",
        "[::1]:5555 is taken by pid 7 (/usr/sbin/nginx -g)",
        "ps-server start --port 0, or stop that process",
    ),
    Case(
        network.judge_port(CONTROL, "127.0.0.1", errno.EADDRINUSE, Listener(None)),
        "warning",
        "a process that this user cannot see",
        "ps-server start --port 0",
    ),
    Case(
        network.judge_port(CONTROL, "127.0.0.1", errno.EADDRINUSE, None),
        "warning",
        "taken by a process in another network namespace",
        "ps-server start --port 0",
    ),
    Case(
        network.judge_port(
            CONTROL, "127.0.0.1", errno.EADDRINUSE, Listener(7, "python /usr/bin/ps-server start")
        ),
        "ok",
        "a ps-server uses 127.0.0.1:5555: pid 7",
    ),
    Case(
        network.judge_port(CONTROL._replace(number=80), "127.0.0.1", errno.EACCES, None),
        "failure",
        "127.0.0.1:80 needs a privileged user",
        "ps-server start --port N, with N at least 1024",
    ),
    Case(
        network.judge_port(CONTROL, "10.0.0.9", errno.EADDRNOTAVAIL, None),
        "failure",
        "10.0.0.9 is not an address of this machine",
        "ps-server start --host",
    ),
    Case(
        network.judge_port(CONTROL, "10.0.0.9", errno.ENETDOWN, None),
        "failure",
        "cannot listen on 10.0.0.9:5555: Network is down",
        "--port 0, or use another --host",
    ),
]


@judgements(CASES)
def test_what_is_found_has_its_message_and_its_fix(case: Case) -> None:
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
    assert find_listener(22) == Listener(None)
    assert find_listener(5556) is None
    assert find_listener(0xC001) is None
    for pid, target in (("12", "socket:[4712]"), ("13", "socket:[4711]")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd" / "3").symlink_to(target)
    assert find_listener(5555) == Listener(13), "it ended before its command was read"


def test_this_process_is_found_where_it_listens_and_refuses_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = find_listener(port)
        assert refusal("127.0.0.1", port) == errno.EADDRINUSE
    assert found == Listener(os.getpid(), command(os.getpid()))
    assert refusal("127.0.0.1", port) == 0
    assert refusal("192.0.2.77", 0) == errno.EADDRNOTAVAIL
    assert find_listener(port) is None


def test_a_long_command_line_is_cut() -> None:
    assert str(Listener(7, "x" * 100)) == f"pid 7 ({'x' * 60}...)"


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


def test_gloo_wants_whole_names_and_nccl_prefixes() -> None:
    assert network.gloo_takes("lo,eth0", HERE)
    assert not network.gloo_takes("eth", HERE)
    assert network.nccl_takes("eth,ib", HERE) == ["eth0", "ib0"]
    assert network.nccl_takes("=eth", HERE) == []
    assert network.nccl_takes("^lo,ib", HERE) == ["eth0"]
    assert network.nccl_takes("^=eth0", HERE) == ["lo", "ib0"]


def test_an_address_is_this_machines_only_if_it_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "look_up", lambda name: Answer(name, ["127.0.0.1", "192.0.2.77"]))
    found = only(network.examine_own_name("127.0.0.1")).found
    assert "192.0.2.77; 192.0.2.77 is not an address of this machine" in found


def test_a_name_stands_for_each_address_once() -> None:
    assert network.look_up("127.0.0.1").addresses == ("127.0.0.1",)
