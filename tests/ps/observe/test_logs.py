from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest

from hubring.ps.observe import logs

LOG = logging.getLogger("hubring.ps.shard.loop")


class Stream(io.StringIO):
    """Keeps what each `write` was given; a terminal if told so."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.writes: list[str] = []
        self._terminal = terminal

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    monkeypatch.setattr(logs.TextLine, "converter", lambda *_: time.gmtime(14 * 3600 + 3 * 60 + 7))
    monkeypatch.setattr(logs.who, "host", "host")
    monkeypatch.setattr(logs.who, "role", "w3")
    monkeypatch.setattr(logs.who, "step", None)
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield Stream()
    root.setLevel(level)
    root.handlers[:] = handlers


def test_line_names_host_role_and_step(stream: Stream) -> None:
    logs.configure(stream=stream)
    LOG.info("joined")
    logs.who.step = 120
    LOG.info("loss %.2f", 0.5)
    assert stream.getvalue() == "14:03:07 host w3 | joined\n14:03:07 host w3 step=120 | loss 0.50\n"


def test_level_is_named_only_from_warnings_up(stream: Stream) -> None:
    logs.configure(stream=stream)
    LOG.debug("unseen")
    LOG.info("plain")
    LOG.warning("slow")
    LOG.error("gone")
    assert stream.getvalue().splitlines() == [
        "14:03:07 host w3 | plain",
        "14:03:07 host w3 | WARNING: slow",
        "14:03:07 host w3 | ERROR: gone",
    ]


def test_every_line_of_a_traceback_says_whose_it_is(stream: Stream) -> None:
    logs.configure(stream=stream)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        LOG.exception("failed")
    lines = stream.getvalue().splitlines()
    begin = "14:03:07 host w3 | "
    assert lines[:2] == [f"{begin}ERROR: failed", f"{begin}  Traceback (most recent call last):"]
    assert lines[-2:] == [f"{begin}  ValueError: two", f"{begin}  lines"]
    assert len(stream.writes) == 1


def test_a_line_break_in_a_message_makes_no_line_that_looks_like_another_message(stream: Stream) -> None:
    logs.configure(stream=stream)
    LOG.warning("rank 1 failed: %s", "x\nERROR: the job failed")
    assert stream.getvalue().splitlines()[1] == "14:03:07 host w3 |   ERROR: the job failed"


def test_colour_is_only_for_terminals(stream: Stream) -> None:
    terminal = Stream(terminal=True)
    logs.configure(stream=terminal)
    LOG.warning("slow")
    LOG.error("gone")
    assert "\x1b[33mWARNING\x1b[0m: slow" in terminal.getvalue()
    assert "\x1b[31mERROR\x1b[0m: gone" in terminal.getvalue()
    logs.configure(stream=stream)
    LOG.warning("slow")
    assert "\x1b" not in stream.getvalue()


def test_json_line_is_one_object(stream: Stream) -> None:
    logs.configure("json", stream)
    logs.who.step = 7
    LOG.warning("two\nlines")
    try:
        raise ValueError("torn")
    except ValueError:
        LOG.exception("failed")
    line, traced = stream.getvalue().splitlines()
    assert json.loads(traced)["traceback"].endswith("ValueError: torn")
    told = json.loads(line)
    assert told.pop("time") > 0
    assert told == {
        "level": "warning",
        "host": "host",
        "role": "w3",
        "step": 7,
        "logger": "hubring.ps.shard.loop",
        "message": "two\nlines",
    }


def test_second_configure_replaces_the_first(stream: Stream) -> None:
    earlier = Stream()
    logs.configure(stream=earlier)
    logs.configure(stream=stream)
    LOG.info("once")
    assert (earlier.getvalue(), stream.getvalue()) == ("", "14:03:07 host w3 | once\n")
