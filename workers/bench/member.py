"""One process of one row: it steps when told to, and says how long that took.

    python -m hubring.workers.bench.member MODULE:CLASS JOB RANK

An order is `STEPS alone` or `STEPS together`. Before each step the member fills
in the gradients, or reads a batch; together, it then says `ready` and steps when it hears `go`, as
all ranks do at once: so neither MPI's barrier, which spins, nor a hub's, which
costs a round, weighs on one row more than on another. After the step it says `stepped` and hears `go` once
all have: who is through early must not take a core, for its next gradients, from those who are timed still.
The answer is a line of JSON: every step's seconds, how many elements are wrong, and the parameters' digest.
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
    """Steps a side, and knows what must come out.

    Args:
        side: How the row exchanges.
        line: Where orders come from.
    """

    def __init__(self, side: Side, line: Line) -> None:
        self._side = side
        self._line = line

    def serve(self) -> None:
        """Obeys until the bench closes the line."""
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
        self._side.await_device()  # its backlog is no part of the step
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

    def _await(self, said: str) -> None:
        """Says how far it is, and blocks until all ranks have said so."""
        self._line.tell(said)
        self._line.hear()


def main() -> None:
    """Takes part until the bench closes the line."""
    side, argument, rank = sys.argv[1:]
    job = Job.decode(argument)
    module, _, name = side.partition(":")
    taken: Side = getattr(import_module(module), name)(job, int(rank))
    Member(taken, Line.dial(job.control)).serve()
    taken.close()


if __name__ == "__main__":
    main()
