"""Programs that are forks behave like new processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubring.ps.core.errors import HubringError
from hubring.ps.process.launch import module_command
from hubring.workers.compare.run.noise import NoiseListener
from hubring.workers.peers.fork_server import ForkServers
from hubring.workers.peers.processes import LocalProcess, RunProcess, StartProgram


def python(code: str) -> list[str]:
    return module_command("timeit", "-n", "1", "-r", "1", code)


@pytest.fixture(scope="module")
def forking() -> Iterator[StartProgram]:
    with ForkServers() as servers:
        assert servers.starter(1) == servers.starter(1)
        yield servers.starter(1)


@pytest.fixture(params=["new", "forked"])
def start(request: pytest.FixtureRequest, forking: StartProgram) -> StartProgram:
    return LocalProcess if request.param == "new" else forking


def ended(start: StartProgram, command: list[str], folder: Path, **variables: str) -> RunProcess:
    program = start("program", command, folder, {**os.environ, **variables})
    program.end(60)
    return program


def test_a_program_has_its_folder_variables_and_files(
    start: StartProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import os, sys; print(dict(os.environ), os.getcwd()); print(sys.stdin.read(), file=sys.stderr)"
    program = start("program", python(code), tmp_path, {"ANY": "one", "LC_CTYPE": "C.UTF-8"})
    program.end(60)
    assert program.code == 0
    assert program.out.read_text().startswith(f"{{'ANY': 'one', 'LC_CTYPE': 'C.UTF-8'}} {tmp_path}\n")
    assert program.err.read_text() == "\n"


@pytest.mark.parametrize(
    ("command", "exits", "says"),
    [
        (module_command("json.tool", "--any"), 2, "unrecognized arguments: --any\n"),
        (module_command("json.tool", os.devnull), 1, "Expecting value: line 1 column 1 (char 0)\n"),
        (module_command("zipfile", "-t", "/nowhere"), 1, "No such file or directory: '/nowhere'\n"),
        (python("import atexit, sys; atexit.register(print, 'bye', file=sys.stderr)"), 0, "bye\n"),
        (python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), -9, ""),
    ],
    ids=["exit code", "exit text", "exception", "atexit", "signal"],
)
def test_a_program_ends_as_python_does(
    start: StartProgram, tmp_path: Path, command: list[str], exits: int, says: str
) -> None:
    program = ended(start, command, tmp_path)
    assert program.code == exits
    assert program.err.read_text().endswith(says)


def test_a_program_leads_a_session_and_is_stopped(start: StartProgram, tmp_path: Path) -> None:
    program = start("program", module_command("http.server", "0"), tmp_path, os.environ)
    assert program.pid is not None
    while os.getsid(program.pid) != program.pid:
        assert program.code is None
    program.ask_to_stop()
    program.end(60)
    assert program.code == -signal.SIGTERM


def test_a_program_that_does_not_stop_is_killed(start: StartProgram, tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    program = start("program", python(code), tmp_path, os.environ)
    program.end(0.0)
    assert program.code == -signal.SIGKILL


def test_programs_draw_different_numbers(start: StartProgram, tmp_path: Path) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    drawn = [ended(start, python(code), tmp_path).out.read_text().split()[:2] for _ in range(2)]
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_the_time_of_forks_is_the_run_s_own(tmp_path: Path) -> None:
    with ForkServers() as servers:
        start = servers.starter(1)
        ended(start, python("1"), tmp_path)  # the fork server has started
        listener = NoiseListener(servers.started)
        code = "import time; end = time.process_time() + 2.0\nwhile time.process_time() < end: pass"
        assert ended(start, python(code), tmp_path).code == 0
        assert listener.sample().own > 2.0


def test_programs_end_with_their_fork_server_which_is_named(tmp_path: Path) -> None:
    with ForkServers() as servers:
        start = servers.starter(1)
        program = start("program", module_command("http.server", "0"), tmp_path, os.environ)
        servers.started[0].kill()
        with pytest.raises(HubringError, match=r"the fork server \(pid \d+\) was killed by signal 9"):
            start("next", python("1"), tmp_path, {})
        program.end(60)
        assert program.code == -signal.SIGKILL
        assert NoiseListener(servers.started).sample().own >= 0.0


def test_an_interrupted_request_leaves_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with ForkServers() as servers:
        start = servers.starter(1)
        monkeypatch.setattr(servers.started[0].stdout, "readline", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start("program", module_command("http.server", "0"), tmp_path, os.environ)
        assert servers.started[0].ended
