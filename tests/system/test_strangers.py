"""Who has no token reads nothing, changes nothing, and the job goes on."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubring.ps.security.token_file import runtime_file
from hubring.ps.transport.grpc.channel import SPARE_CONNECTIONS
from hubring.workers.compare.plan.setting import Link
from hubring.workers.compare.run.site import network, why_not
from tests.support.processes.cluster import PATIENCE, SCRIPTS, SMALL, Cluster, Program, await_all

FOREVER = "1000000"
MARKED = str(SCRIPTS / "marked.py")
WINDOW = 16
"""Bytes of a parameter or gradient that count as seen."""


def refused(stranger: Program) -> set[str]:
    """Checks that a stranger was refused everything over TCP; returns how over shared memory."""
    found = stranger.done()
    assert found.pop("token file") == "PermissionError"
    assert found.pop("zmq") == "silence"
    shared = {found.pop(name) for name in list(found) if name.startswith("shm")}
    assert {found.pop(name) for name in list(found) if name.startswith("unix")} == {"PermissionError"}
    assert len(found) >= 31
    assert set(found.values()) == {"UNAVAILABLE"}, found
    return shared


@pytest.mark.slow
def test_another_user_of_the_host_is_refused_everything(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "1", "--no-page")
    worker = cluster.worker(address, SMALL, FOREVER)
    worker.until(lambda: cluster.step(address) > 0, "steps")
    (shard,) = server.children("hubring.ps.shard.process")
    file = runtime_file(int(address.rpartition(":")[2]))
    stranger = cluster.run("stranger", "tests.support.scripts.stranger", address, str(file), str(shard))
    shared = refused(stranger)
    assert shared
    assert "allowed" not in shared
    before = cluster.step(address)
    worker.until(lambda: cluster.step(address) > before, "more steps")
    assert "\x1b" not in server.said()


@contextlib.contextmanager
def crowd(address: str) -> Iterator[None]:
    """Strangers who connect all the time, and send nothing."""
    host, _, port = address.rpartition(":")
    lines, full, over = deque[socket.socket](), threading.Event(), threading.Event()

    def connect() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                lines.append(socket.create_connection((host, int(port)), 1.0))
            if len(lines) > 2 * SPARE_CONNECTIONS:
                full.set()
                lines.popleft().close()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        assert full.wait(PATIENCE)
        yield
    finally:
        over.set()
        thread.join()
        for line in lines:
            line.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_strangers_who_connect_all_the_time_keep_out_no_member(
    cluster: Cluster, tmp_path: Path, way: str
) -> None:
    tokens = ["--token-file", str(tmp_path / "tokens")] if way == "tcp" else []
    server, address = cluster.server("--workers", "1", "--once", *tokens)
    with crowd(address):
        assert cluster.run("status", "hubring.ps.cli", "status", address, *tokens).wait() == 0
        assert cluster.worker(address, *tokens, "--transport", "grpc", SMALL, "5").done()["steps"] == 5
        server.done()
    assert len(server.said().splitlines()) < 200


@pytest.mark.slow
def test_a_wrong_and_a_missing_token_are_refused_and_the_right_one_trains(
    cluster: Cluster, tmp_path: Path
) -> None:
    tokens, other = tmp_path / "tokens", tmp_path / "other"
    server, address = cluster.server("--workers", "1", "--once", "--token-file", str(tokens))
    cluster.run("new", "hubring.ps.cli", "token", "new", str(other)).done()
    page = Path(server.said().partition("link with the token: ")[2].partition(")")[0])
    assert page.stat().st_mode & 0o777 == 0o600
    page_token = page.read_text().strip().partition("#token=")[2]
    without = cluster.worker(address, SMALL, "5")
    assert without.wait() == 78
    assert "refused this program: it has no token; copy the server's token file" in without.said()
    wrong = cluster.worker(address, "--token-file", str(other), SMALL, "5")
    assert wrong.wait() != 0
    assert "token" in wrong.said()
    right = cluster.worker(address, "--token-file", str(tokens), SMALL, "5")
    right.done()
    server.done()
    secrets = [page_token, *(line.rpartition(":")[2] for line in tokens.read_text().split())]
    said = "".join(program.said() + program.out.read_text() for program in cluster.programs)
    assert not [secret for secret in secrets if secret in said]


@pytest.mark.slow
@pytest.mark.full
def test_a_doctor_without_a_token_is_told_what_to_copy_and_that_a_server_answers(
    cluster: Cluster, tmp_path: Path
) -> None:
    killed, address = cluster.server("--no-page", name="killed")
    killed.process.kill()  # its tokens stay where the doctor looks for some
    killed.process.wait()
    port = address.rpartition(":")[2]
    tokens = tmp_path / "tokens"
    cluster.server("--no-page", "--port", port, "--token-file", str(tokens))
    doctor = cluster.run("doctor", "hubring.ps.cli", "doctor", "--timeout", "60", address)
    found = {each["name"]: each for each in doctor.done(78)["findings"]}
    assert found["server"]["found"].endswith("refused this program: it has no token")
    assert found["server"]["fix"].startswith("copy the server's token file, which its banner names, to this")
    for name in ("versions", "clocks"):
        assert found[name]["found"] == "server failed"
    words = ["--timeout", "60", address, "--token-file", str(tokens)]
    right = cluster.run("right", "hubring.ps.cli", "doctor", *words)
    assert right.wait() == 0, right.said()
    secrets = [line.rpartition(":")[2] for line in tokens.read_text().split()]
    assert not [secret for secret in secrets if secret in right.said() + right.out.read_text()]


@pytest.mark.slow
@pytest.mark.full
def test_no_process_shows_a_secret_in_its_command_line(tmp_path: Path) -> None:
    """Other users can read it."""
    tokens, page = tmp_path / "tokens", tmp_path / "page"
    page.write_text("the token of the status page")
    page.chmod(0o600)
    with Cluster(tmp_path) as cluster:  # without a fork server, whose forks have its command line
        files = ["--token-file", str(tokens), "--page-token-file", str(page)]
        server, address = cluster.server("--workers", "1", "--colocate", *files)
        worker = cluster.worker(address, "--token-file", str(tokens), SMALL, FOREVER)
        worker.until(lambda: bool(worker.children("hubring.ps.shard.process")), "a shard")
        pids = [server.process.pid, worker.process.pid, *worker.children("hubring.ps.shard.process")]
        secrets = [line.rpartition(":")[2] for line in tokens.read_text().split()]
        for pid in pids:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert "hubring" in shown
            assert not [secret for secret in (*secrets, page.read_text()) if secret in shown]
            assert Path(f"/proc/{pid}/environ").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_members_stay_after_a_rotation_of_tokens(cluster: Cluster) -> None:
    """Those that wait to start, and those that train."""
    server, address = cluster.server("--workers", "2", "--no-page")
    waits = "waiting for 1 of 2 workers"
    first = cluster.worker(address, SMALL, FOREVER)
    first.until_said(waits)
    file = runtime_file(int(address.rpartition(":")[2]))
    earlier = cluster.folder / "earlier"
    earlier.write_text(file.read_text())
    earlier.chmod(0o600)
    cluster.run("rotate", "hubring.ps.cli", "token", "rotate", address).done()
    expired = cluster.run("status", "hubring.ps.cli", "status", address, "--token-file", str(earlier))
    assert expired.wait() == 78
    assert "the token has expired, because the server's tokens were rotated" in expired.said()
    asked = first.said().count(waits)
    first.until(lambda: first.said().count(waits) > asked + 1, "two more polls")  # one may be under way
    cluster.worker(address, SMALL, FOREVER)
    first.until(lambda: cluster.step(address) > 0, "steps")
    cluster.run("rotate-again", "hubring.ps.cli", "token", "rotate", address).done()
    before = cluster.step(address)
    first.until(lambda: cluster.step(address) > before, "more steps", PATIENCE)
    assert server.process.poll() is None


def seen(seed: int, file: Path) -> int:
    """Returns how many windows of a mark are in what was sniffed."""
    from tests.support.scripts.marked import mark

    content, sought = file.read_bytes(), mark(seed).numpy().tobytes()
    return sum(sought[at : at + WINDOW] in content for at in range(0, len(sought), WINDOW))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("transport", "flags", "plain"),
    [("zmq", [], False), ("grpc", [], False), ("zmq", ["--plain-data"], True)],
)
def test_a_host_on_the_network_reads_nothing(
    cluster: Cluster, tmp_path: Path, transport: str, flags: list[str], plain: bool
) -> None:
    """It is refused everything, and what it sniffs has bytes of the model only with `--plain-data`."""
    if reason := why_not():
        pytest.skip(reason)
    with network(3, Link()) as (here, there, elsewhere):
        tokens, sniffed, received = (tmp_path / name for name in ("tokens", "sniffed", "received"))
        command = ["--workers", "2", "--host", here.address, "--token-file", str(tokens), *flags]
        server, address = cluster.server(*command, within=here.command())
        sniffers = [
            cluster.run(
                f"sniffer{number}", "tests.support.scripts.sniffer", "eth0", str(file), within=host.command()
            )
            for number, (host, file) in enumerate(((here, sniffed), (elsewhere, received)))
        ]
        await_all(sniffers, "listening")
        worker = ["--transport", transport, "--token-file", str(tokens), MARKED, FOREVER]
        pair = [cluster.worker(address, *worker, within=there.command()) for _ in range(2)]
        pair[0].until(lambda: sniffed.stat().st_size > 1 << 20, "traffic")
        (shard,) = server.children("hubring.ps.shard.process")
        words = "tests.support.scripts.stranger", address, str(tokens), str(shard)
        stranger = cluster.run("stranger", *words, within=elsewhere.command())
        assert refused(stranger) == {"ConnectionRefusedError"}
        assert all(each.process.poll() is None for each in (server, *pair))
        for sniffer in sniffers:
            sniffer.process.send_signal(signal.SIGTERM)
            assert sniffer.wait() == 0
        cluster.end()  # while the processes can still reach each other
    assert received.stat().st_size > 10_000
    assert (seen(1, received), seen(2, received)) == (0, 0)
    assert (seen(1, sniffed) > 0, seen(2, sniffed) > 0) == (plain, plain)
