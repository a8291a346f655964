"""One process of one row: it takes steps on request, and reports the time of each.

    python -m hubring.workers.bench.member MODULE:CLASS JOB RANK

A request is `STEPS alone` or `STEPS together`. Before each step the member writes the gradients, or reads a
batch. With `together` the member then sends `ready` and waits for `go`, so that all ranks start at the same
time. This replaces a row's own barrier: MPI's barrier spins and a hub's costs a round, which would favour
some rows. After the step the member sends `stepped`, and waits for `go` until all ranks have stepped. So an
early rank does not take a core for its next gradients from ranks that are still timed.

The answer is a line of JSON: the seconds of every step, the number of wrong elements, and the parameters'
digest.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module

from hubring.ps.core.errors import ConnectionLost
from hubring.workers.bench.job import Job
from hubring.workers.bench.line import Line
from hubring.workers.bench.rows.row_member import Side


class Member:
    """Takes steps on request, and checks the results.

    Args:
        side: The row's exchange.
        line: The connection to the bench.
    """

    def __init__(self, side: Side, line: Line) -> None:
        self._side = side
        self._line = line

    def serve(self) -> None:
        """Serves requests until the bench closes the connection."""
        while True:
            try:
                steps, how = self._line.hear().split()
            except ConnectionLost:
                return
            seconds = [self._step(together=how == "together") for _ in range(int(steps))]
            wrong = self._side.check.wrong(self._side.values())
            reply = {"seconds": seconds, "wrong": wrong, "digest": self._side.digest()}
            self._line.tell(json.dumps(reply))

    def _step(self, *, together: bool) -> float:
        for rank in self._side.ranks:
            self._side.check.write(self._side.gradients(rank), rank)
        self._side.prepare()
        self._side.await_device()  # queued work is not part of the step
        if together:
            self._await("ready")
        began = time.perf_counter()
        self._side.step()
        self._side.await_device()
        seconds = time.perf_counter() - began
        if together:
            self._await("stepped")
        self._side.check.advance()
        return seconds

    def _await(self, state: str) -> None:
        """Sends the state, and blocks until all ranks have sent it."""
        self._line.tell(state)
        self._line.hear()


def main() -> None:
    """Runs a member until the bench closes the connection."""
    side, argument, rank = sys.argv[1:]
    job = Job.decode(argument)
    module, _, name = side.partition(":")
    exchange: Side = getattr(import_module(module), name)(job, int(rank))
    Member(exchange, Line.dial(job.control)).serve()
    exchange.close()


if __name__ == "__main__":
    main()
