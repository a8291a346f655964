"""Records the calls of a process, in each of its threads. Python imports this module as it starts.

TRACE_FOLDER says where the records go, TRACE_PACKAGE the folder of the functions to record. The main thread
records from SIGPROF on, so that the imports do not take twice as long.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

FOLDER = Path(os.environ["TRACE_FOLDER"])
MARK = FOLDER / f"{os.getpid()}.pid"
"""Says that this process takes SIGPROF."""
OURS = (os.environ["TRACE_PACKAGE"], str(Path(__file__).with_name("steady.py")))


class Record:
    """The calls of one thread: when each began, how deep it is, its file, function and line."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str, str, int]] = []
        self.depth = 0


records: defaultdict[int, Record] = defaultdict(Record)


def profile(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(OURS):
        return
    record = records[threading.get_ident()]
    if event == "call":
        name = code.co_qualname
        record.calls.append((time.monotonic_ns(), record.depth, code.co_filename, name, code.co_firstlineno))
    record.depth += 1 if event == "call" else -1


def write() -> None:
    MARK.unlink()
    for thread, record in list(records.items()):
        (FOLDER / f"{os.getpid()}-{thread}.json").write_text(json.dumps(record.calls))


signal.signal(signal.SIGPROF, lambda *_: sys.setprofile(profile))
threading.setprofile(profile)
atexit.register(write)
MARK.touch()
