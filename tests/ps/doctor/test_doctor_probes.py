"""What the doctor reads of a machine, and what people see of it."""

from __future__ import annotations

import errno
import inspect
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hubring.ps import cli
from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor import (
    cuda,
    disk,
    environment,
    gloo,
    interfaces,
    isolation,
    listeners,
    names,
    nccl,
    packages,
    ports,
    screen,
    subject,
    torch_build,
)
from hubring.ps.doctor.finding import Finding, failure, ok, skipped, warning
from hubring.ps.doctor.listeners import Listener
from hubring.ps.doctor.packages import Requirement
from hubring.ps.doctor.sizes import GIB, MIB, spelt
from tests.conftest import command

HERE = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": ""}
HERE_ALONE = subject.Subject(ServerConfig(), None, None, {}, 20.0)


def only(findings: Sequence[Finding]) -> Finding:
    [finding] = findings
    return finding


# Versions.


def test_requirements_leave_out_those_of_extras() -> None:
    lines = ["grpcio>=1.85", "torch>=2.13", "mpi4py>=4; extra == 'bench'"]
    assert packages.requirements(lines) == [Requirement("grpcio", "1.85"), Requirement("torch", "2.13")]


@pytest.mark.parametrize(
    ("version", "least", "met"),
    [
        ("2.13.0+cpu", "2.13", True),
        ("2.9.1", "2.13", False),
        ("3", "2.13", True),
        ("2.14.0a0+git1", "2.13", True),
        ("1.85.0", "1.85.1", False),
        ("unknown", "1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, least: str, met: bool) -> None:
    assert Requirement("torch", least).met_by(version) == met


def test_our_own_package_names_what_it_needs() -> None:
    assert {"torch", "grpcio", "protobuf"} <= {each.name for each in packages.needs()}


# GPUs.


@pytest.mark.parametrize(
    ("capability", "arches", "runs"),
    [
        ((9, 0), ["sm_90"], True),
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((7, 0), ["compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_120"], True),
        ((12, 1), ["sm_120a"], False),
        ((12, 1), ["sm_120f"], True),
        ((9, 0), [], False),
    ],
)
def test_a_build_fits_a_gpu_as_nvidia_says(
    capability: tuple[int, int], arches: list[str], runs: bool
) -> None:
    assert cuda.fits(capability, arches) == runs


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
            "535.129.03",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
            "580.95.05",
        ),
        ("nothing of the kind", None),
    ],
)
def test_the_drivers_version_is_read(text: str, version: str | None) -> None:
    assert cuda.driver_version(text) == version


def see_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], count: int = 2) -> None:
    """Lets torch be one that is built for CUDA and finds GPUs; what is computed there is on the CPU."""
    ones, full = torch.ones, torch.full
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    properties.major, properties.minor = capability
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(torch, "full", lambda *arguments, device: full(*arguments))
    for name, value in {
        "is_available": True,
        "init": None,
        "get_arch_list": ["sm_90"],
        "device_count": count,
        "get_device_properties": properties,
        "mem_get_info": (70 * GIB, 80 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_each_gpu_that_torch_sees_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, (9, 0))
    found = [*cuda.examine({})]
    assert [(finding.name, finding.state) for finding in found] == [("CUDA 0", "ok"), ("CUDA 1", "ok")]
    assert "NVIDIA H100 (sm_90), 70 GiB of 80 GiB free" in found[0].found
    assert found[0].found.endswith("torch for CUDA 13.0")


def test_a_gpu_without_kernels_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, (6, 1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    assert [finding.state for finding in cuda.examine({})] == ["failure"] * 2


def test_a_gpu_that_does_not_compute_is_told_by_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: device-side assert\nand more")

    see_gpus(monkeypatch, (9, 0), count=1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert "does not compute: CUDA error: device-side assert" in only([*cuda.examine({})]).found
    monkeypatch.setattr(torch.cuda, "init", lambda: fail(0))
    monkeypatch.setattr(cuda, "files", lambda: ["/dev/nvidia0"])
    assert "cannot use them" in only([*cuda.examine({})]).found


def test_nccl_is_held_to_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))

    def add(parts: list[torch.Tensor]) -> None:
        total = torch.stack(parts).sum(0)
        for part in parts:
            part.copy_(total)

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", add)
    assert only([*nccl.examine()]) == ok(
        "NCCL", "2.27.5 in torch's build adds over the 2 GPU(s) of this machine"
    )
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", lambda parts: parts[1].fill_(3))
    assert "the sum is wrong on cuda:0" in only([*nccl.examine()]).found


def test_gloo_is_held_to_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_add", lambda rank, *_: torch.tensor([3.0, 3.0 + rank]))
    assert "the sum is wrong on rank 1" in only([*gloo.examine(HERE_ALONE)]).found


# The network.

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:15B3 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
   1: 0100007F:15B3 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0
"""


def test_a_torch_that_loads_slowly_leaves_its_checks_time_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = inspect.signature(cli.doctor).parameters["timeout"].default
    given: list[float] = []
    monkeypatch.setattr(torch_build, "time", SimpleNamespace(monotonic=iter([100.0, 106.0]).__next__))

    def examine(checks: object, *times: float) -> list[Finding]:
        given.extend(times)
        return []

    monkeypatch.setattr(isolation, "examine", examine)
    assert list(torch_build.examine([], seconds)) == []
    left, last = given
    assert left >= 3.0
    assert 6.0 + left + 2 * last <= seconds, "else it is killed before it can tell who hangs"


def test_only_who_listens_counts() -> None:
    assert listeners.inodes(TCP, 5555) == ["4711"]
    assert listeners.inodes(TCP, 22) == ["4713"]
    assert listeners.inodes(TCP, 5556) == []


def test_the_process_that_listens_is_found_by_its_open_files(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP)
    (tmp_path / "self").mkdir()
    for pid, target in (("12", "/dev/null"), ("13", "socket:[4711]")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd" / "3").symlink_to(target)
        (tmp_path / pid / "cmdline").write_text("nginx\0-g\0daemon off;\0")
    assert listeners.find(5555, tmp_path) == Listener(13, "nginx -g daemon off;")
    assert listeners.find(22, tmp_path) == Listener(None)
    assert listeners.find(5556, tmp_path) is None


def test_this_process_is_found_where_it_listens_and_refuses_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = listeners.find(port)
        assert ports.refused("127.0.0.1", port) == errno.EADDRINUSE
    assert found == Listener(os.getpid(), command(os.getpid()))
    assert ports.refused("127.0.0.1", port) == 0
    assert ports.refused("192.0.2.77", 0) == errno.EADDRNOTAVAIL


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
    assert [port.number for port in ports.wanted(config)] == expected


def test_gloo_wants_whole_names_and_nccl_prefixes() -> None:
    assert interfaces.gloo_takes("lo,eth0", HERE)
    assert not interfaces.gloo_takes("eth", HERE)
    assert interfaces.nccl_takes("eth,ib", HERE) == ["eth0", "ib0"]
    assert interfaces.nccl_takes("=eth", HERE) == []
    assert interfaces.nccl_takes("^lo,ib", HERE) == ["eth0"]
    assert interfaces.nccl_takes("^=eth0", HERE) == ["lo", "ib0"]


def test_an_address_is_this_machines_only_if_it_can_be_bound() -> None:
    assert names.is_own("127.0.0.1")
    assert not names.is_own("192.0.2.77")


def test_a_name_stands_for_each_address_once() -> None:
    assert names.look_up("127.0.0.1").addresses == ("127.0.0.1",)


# Disk.

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:30 / /saved rw - nfs4 server:/saved rw
31 30 0:31 / /saved/a\\040b rw - tmpfs tmpfs rw
32 27 0:32 / /saved rw - xfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/run", "ext4"), ("/saved/run", "xfs"), ("/saved/a b/c", "tmpfs"), ("/savedly", "ext4")],
)
def test_the_innermost_mount_counts_and_of_those_the_last(folder: str, kind: str) -> None:
    assert disk.mounted(MOUNTS, Path(folder)) == kind


def test_a_folder_that_is_not_there_yet_is_tried_above_and_not_made(tmp_path: Path) -> None:
    found = only([*disk.examine(tmp_path / "not" / "yet")])
    assert str(tmp_path / "not" / "yet") in found.found
    assert found.state != "failure"
    assert [*tmp_path.iterdir()] == []


def test_a_file_in_the_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    found = only([*disk.examine(tmp_path / "taken" / "run")])
    assert (found.state, found.found) == ("failure", f"{tmp_path / 'taken'} is no folder")


def test_the_newest_checkpoint_tells_how_large_the_next_will_be(tmp_path: Path) -> None:
    for name, count in (("000009-step-90", 10), ("000010-step-100", 20), (".writing-7", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard0").write_bytes(bytes(count))
    assert disk._look(tmp_path).newest == 20


# Settings.


def examined(variables: dict[str, str], file: Path | None = None) -> list[Finding]:
    config = subject.settled({}, file, variables)
    return [*environment.examine(subject.Subject(config, file, None, variables, 1.0))]


def test_each_variable_is_judged_by_itself() -> None:
    wrong = examined({"PS_WORKER": "2", "PS_PORT": "ten", "PS_SERVER": "", "PS_MODE": "asp", "HOME": "/"})
    assert [finding.state for finding in wrong] == ["failure"] * 3
    assert [
        word in finding.found
        for finding, word in zip(wrong, ("PS_WORKERS?", "a port from", "is empty"), strict=True)
    ]
    assert "leave PS_WORKER out" in wrong[0].mend


@pytest.mark.parametrize("variables", [{"PS_STALENESS": "3"}, {"PS_BACKEND": "nccl"}])
def test_settings_that_contradict_each_other_are_a_warning_as_flags_may_mend_it(
    variables: dict[str, str],
) -> None:
    assert only(examined(variables)).state == "warning"


@pytest.mark.parametrize(
    "variables", [{}, {"PS_TOPOLOGY": "ring"}, {"PS_SERVER": "hub1:5555", "PS_WORLD_SIZE": "4"}]
)
def test_a_worker_is_taken_to_have_a_server(variables: dict[str, str]) -> None:
    assert only(examined(variables)).state == "ok"


def test_a_file_that_is_wrong_is_told_and_the_rest_is_looked_at_with_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[server]\nprot = 7000\n")
    told = only(examined({}, file))
    assert told.state == "failure"
    assert "did you mean port?" in told.found
    assert subject.settled({}, file, {}).port == 5555


def test_settings_are_those_that_a_server_would_find(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[server]\nport = 7000\n")
    config = subject.settled({"checkpoint_dir": tmp_path}, file, {"PS_PAGE_PORT": "8000"})
    assert (config.port, config.page_port, config.checkpoint_dir) == (7000, 8000, tmp_path)
    with pytest.raises(ConfigError, match="--port 70000"):
        subject.settled({"port": 70000}, None, {})


def test_the_ring_of_a_server_here_meets_here() -> None:
    here = HERE_ALONE
    assert here.ring_address == "127.0.0.1"
    assert here._replace(server="localhost:5555").ring_address == "localhost"
    with pytest.raises(ConfigError, match="no address of this machine leads to"):
        _ = here._replace(server="255.255.255.255:5555").ring_address


# What people see.


def test_lines_show_each_mend_below_what_it_mends() -> None:
    findings = [
        ok("torch", "2.13"),
        failure("checkpoint dir", "[full]", "make room"),
        skipped("NCCL", "no GPU"),
    ]
    assert screen.lines(findings) == [
        "ok       torch           2.13",
        "failure  checkpoint dir  [full]",
        "                         mend: make room",
        "skipped  NCCL            no GPU",
    ]
    assert screen.summary(findings) == "1 failure, 0 warnings; 1 ok, 1 skipped"


def test_without_a_terminal_a_finding_is_a_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    screen.show([warning("a", "b" * 300, "c" * 300)])
    told = capsys.readouterr()
    assert told.out == ""
    assert [len(line) for line in told.err.splitlines()[:2]] == [7 + 2 + 1 + 2 + 300, 7 + 2 + 1 + 2 + 6 + 300]


def test_on_a_terminal_there_is_a_table_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    screen.show([failure("disk", "[full] " + "word " * 40, "make room"), ok("torch", "2.13")])
    told = capsys.readouterr().err
    assert "[full]" in told
    assert "make room" in told
    assert "\x1b[" in told


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (64 * MIB, "64 MiB"),
        (1.5 * GIB, "1.5 GiB"),
        (1000 * MIB, "1000 MiB"),
    ],
)
def test_bytes_are_spelt_in_the_largest_unit(nbytes: float, text: str) -> None:
    assert spelt(nbytes) == text
