"""Hosts with slots, and the ranks that a launcher gives to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hubring.workers.horovod.world.hosts import neighbourhood

__all__ = [
    "INVALID_SLOT_INFO",
    "HostInfo",
    "SlotInfo",
    "get_host_assignments",
    "parse_host_files",
    "parse_hosts",
    "parse_hosts_and_slots",
]

HOST = re.compile(r"([\w.-]+):([0-9]+)")


@dataclass
class HostInfo:
    """A host, and how many processes it can run."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Returns the host of a text HOST:SLOTS.

        Raises:
            ValueError: The text has another form.
        """
        found = HOST.fullmatch(host_string.strip())
        if found is None:
            raise ValueError(f"host {host_string!r}: expected HOST:SLOTS, for example worker-0:2")
        return HostInfo(found[1], int(found[2]))


@dataclass
class SlotInfo:
    """One process: its host, its rank, and its place among the processes (see `hvd.local_rank`)."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Returns ranks and sizes, separated by commas."""
        ranks = self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size
        return ",".join(map(str, ranks))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Returns the hosts of a text HOST:SLOTS,HOST:SLOTS."""
    return [HostInfo.from_string(one) for one in hosts_string.split(",")]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Returns the names of the hosts, and the slots by name."""
    found = parse_hosts(hosts)
    return [one.hostname for one in found], {one.hostname: one.slots for one in found}


def parse_host_files(filename: str | Path) -> str:
    """Returns the hosts of a file with lines HOST slots=SLOTS as HOST:SLOTS,HOST:SLOTS."""
    lines = [line.split() for line in Path(filename).read_text().splitlines() if line.strip()]
    return ",".join(f"{name}:{slots.partition('=')[2]}" for name, slots, *_ in lines)


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Gives ranks to the slots of the hosts, in order.

    Args:
        hosts: The hosts.
        min_num_proc: Least number of processes.
        max_num_proc: Most processes; None: one for each slot.

    Raises:
        ValueError: The hosts have too few slots.
    """
    names = [host.hostname for host in hosts for _ in range(host.slots)][:max_num_proc]
    if len(names) < min_num_proc:
        raise ValueError(f"{min_num_proc} processes need as many slots, but the hosts have {len(names)}")
    places = [neighbourhood(rank, names) for rank in range(len(names))]
    return [
        SlotInfo(
            names[rank],
            rank,
            place.local_rank,
            place.cross_rank,
            len(names),
            place.local_size,
            place.cross_size,
        )
        for rank, place in enumerate(places)
    ]
