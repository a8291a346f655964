"""Where runs take place: on this machine, with or without links, or on the tasks of a cluster.

On this machine, hosts with links are network namespaces. Their switch is the kernel's bridge, or a relay if
the links have latency. It has its own namespace, so this machine's network does not change. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

from msgspec import Struct

from hubring.ps.core.errors import HubringError, UsageError
from hubring.ps.core.timing import ClockOffset
from hubring.workers.compare.plan.setting import BURST_BYTES, Link, Setting
from hubring.workers.compare.run.noise import NoiseListener, RunNoise, of_machine
from hubring.workers.compare.run.relay import relay
from hubring.workers.peers import machine
from hubring.workers.peers.fork_server import ForkServers
from hubring.workers.peers.processes import LocalProcess, StartProgram

QUEUE_BYTES = 64 << 20
"""Queue of a link. It holds everything that the senders' buffers allow in flight, so no packet is dropped.

A packet lost at the end of a step costs TCP's timeout of 200 ms, a property of TCP and not of hub or ring.
"""

CONGESTION_CONTROL = "cubic"
"""Linux's default, whatever this machine is set to."""

MOST_HOSTS = 250
"""Fewer than the addresses of one network."""

_NAMES = re.compile(r"hubring-(\d+)-\d+-\w+")
_count = itertools.count()


class NetworkFailed(HubringError):
    """A network cannot be built; the message shows the error of `ip` or `tc`."""


class Host(Struct, frozen=True):
    """A namespace with its address for the others."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Returns the command that runs a program there, in the started process itself."""
        return ["ip", "netns", "exec", self.name, *arguments]


@contextlib.contextmanager
def network(hosts: int, link: Link) -> Iterator[list[Host]]:
    """Provides hosts on one switch, each with such a link.

    The rate is that of a host's link, each way. Latency and jitter apply once between two hosts.

    Raises:
        UsageError: There are more hosts than addresses.
        NetworkFailed: Namespaces or links cannot be created; check with `why_not` first.
        HubringError: The relay failed.
    """
    if hosts > MOST_HOSTS:
        raise UsageError(f"{hosts} hosts on one switch; expected at most {MOST_HOSTS}")
    _sweep()
    prefix = f"hubring-{os.getpid()}-{next(_count)}"
    switch = Host(f"{prefix}-switch", "")
    members = [Host(f"{prefix}-{number}", f"10.77.0.{number + 1}") for number in range(hosts)]
    ports = [f"port{number}" for number in range(hosts)]
    with contextlib.ExitStack() as stack:
        _add(switch, stack)
        for host, port in zip(members, ports, strict=True):
            _add(host, stack)
            _plug(host, switch, port, link)
        if link.latency:
            stack.enter_context(relay(switch.command(), link, ports))
        else:
            _bridge(switch, ports)
        yield members


def why_not(link: Link | None = None) -> str:
    """Returns why no network with such links can be built here; empty if it can.

    Args:
        link: None: a link with a rate and no latency.
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    return _tried(link or Link(rate=1e9))


@cache
def _tried(link: Link) -> str:
    try:
        with network(1, link):
            return ""
    except HubringError as error:
        return f"this machine cannot build network namespaces with such links: {error}"


def _add(host: Host, stack: contextlib.ExitStack) -> None:
    _call("ip", "netns", "add", host.name)
    stack.callback(_call, "ip", "netns", "delete", host.name)  # also deletes its ends of the links
    _call("ip", "-n", host.name, "link", "set", "lo", "up")


def _plug(host: Host, switch: Host, port: str, link: Link) -> None:
    """Connects a host to the switch; both ends of the link limit what they send."""
    veth = ["type", "veth", "peer", "name", "eth0", "netns", host.name]
    _call("ip", "-n", switch.name, "link", "add", port, *veth)
    _call("ip", "-n", switch.name, "link", "set", port, "up")
    _call("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    _call("ip", "-n", host.name, "link", "set", "eth0", "up")
    route = ["10.77.0.0/24", "dev", "eth0", "congctl", CONGESTION_CONTROL]
    _call("ip", "-n", host.name, "route", "replace", *route)
    if link.rate is not None:
        bucket = ["rate", f"{link.rate:.0f}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
        for name, device in ((host.name, "eth0"), (switch.name, port)):
            _call("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def _bridge(switch: Host, ports: list[str]) -> None:
    _call("ip", "-n", switch.name, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-n", switch.name, "link", "set", "bridge", "up")
    for port in ports:
        _call("ip", "-n", switch.name, "link", "set", port, "master", "bridge")


def _sweep() -> None:
    """Deletes the networks of killed programs, which could not clean up."""
    made = Path("/run/netns")
    for name in [entry.name for entry in made.iterdir()] if made.is_dir() else []:
        found = _NAMES.fullmatch(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            try:
                _call("ip", "netns", "delete", name)
            except NetworkFailed:
                if (made / name).exists():  # else another program deleted it at the same time
                    raise


def _call(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as cause:
        raise NetworkFailed(f"no program {command[0]!r} on this host; install iproute2") from cause
    except subprocess.CalledProcessError as cause:
        raise NetworkFailed(f"`{' '.join(command)}` failed: {cause.stderr.strip()}") from cause


HERE = "127.0.0.1"


class LocalHosts(Struct, frozen=True):
    """The hosts of one run by role: "server" (the coordinator and the first shard), "shard 1", "worker 0".

    Attributes:
        behind_links: Hosts with links, by role; empty: all programs run on this machine.
        sharing: Workers of each of these hosts.
    """

    behind_links: Mapping[str, Host] = {}
    sharing: int = 1

    @property
    def apart(self) -> bool:
        """Whether the server, further shards and workers have their own hosts."""
        return bool(self.behind_links)

    def local_rank(self, rank: int) -> int:
        """Returns a worker's number among those of its host."""
        return rank % self.sharing if self.behind_links else rank

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs a program on a role's host, in the started process itself."""
        return self.behind_links[role].command(*argv) if self.behind_links else list(argv)

    def address(self, role: str) -> str:
        """Returns the address at which a role's programs listen."""
        return self.behind_links[role].address if self.behind_links else HERE


def check_link(setting: Setting) -> None:
    """Checks that a setting's hosts are available, before anything runs.

    Raises:
        UsageError: As `hosts` does.
    """
    if setting.link is not None and (reason := why_not(setting.link)):
        raise UsageError(
            f"the link {setting.link} is not available here: {reason}. Run as root on Linux with iproute2"
            " (ip, tc), or remove the link"
        )


@contextlib.contextmanager
def hosts(setting: Setting) -> Iterator[LocalHosts]:
    """Provides the hosts of a setting while the block runs.

    Programs must end before the block. On a host that is not this machine, `ps-server` needs `--host ADDRESS
    --insecure`, and further shards start with `--join`.

    Raises:
        UsageError: There is a link, and networks cannot be built here.
        HubringError: A network could not be built, or failed later.
    """
    check_link(setting)
    if setting.link is None:
        yield LocalHosts()
        return
    sharing = setting.link.sharing
    number_of = {role: index for index, role in enumerate(server_roles(setting))}
    apart = len(number_of)
    number_of |= {f"worker {rank}": apart + rank // sharing for rank in range(setting.workers)}
    with network(max(number_of.values()) + 1, setting.link) as members:
        yield LocalHosts({role: members[number] for role, number in number_of.items()}, sharing)


def server_roles(setting: Setting) -> list[str]:
    """Returns the roles with a host beside the workers': the server and further shards."""
    return ["server", *(f"shard {number}" for number in range(1, setting.servers))]


class ThisMachine:
    """Runs all programs as children of this process, with or without links.

    `hubring.workers.compare.run.conductor.Conductor` has the same methods for many machines.

    Args:
        fork_servers: Start programs faster; None: each is a new process.
    """

    def __init__(self, fork_servers: ForkServers | None = None) -> None:
        self._fork_servers = fork_servers

    def hosts(self, setting: Setting) -> AbstractContextManager[LocalHosts]:
        """Provides the hosts of a setting while the block runs."""
        return hosts(setting)

    def threads(self, workers: int) -> int:
        """Returns PyTorch threads per worker, so that no worker has to wait for a core."""
        return max(1, machine.cores() // workers)

    def starter(self, threads: int) -> StartProgram:
        """Returns a function that starts a program with so many PyTorch threads on its host."""
        return LocalProcess if self._fork_servers is None else self._fork_servers.starter(threads)

    def listen(self) -> Callable[[], Sequence[RunNoise]]:
        """Starts to measure noise. Call the result for each machine's once the programs have ended."""
        listener = NoiseListener(self._fork_servers.started if self._fork_servers is not None else ())
        return lambda: [of_machine([listener.sample()])]

    def clocks(self) -> Mapping[str, ClockOffset]:
        """Measures how far the server's clock is ahead of each machine's, by `name_kernel`."""
        return {}
