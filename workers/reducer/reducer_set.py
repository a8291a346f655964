"""Reducers that are exchanged together, because some optimizer steps the parameters of them all.

Where workers step, all ranks send the buckets of a set in one order: reducer by reducer, as they were made,
and each reducer's groups in order. A reducer that one rank's loss does not reach takes part with zeros, since
the loss of another rank may reach it. So what is sent does not depend on what backward does.

A turn is what one exchange gives to every optimizer of the set: it lasts until the next backward or
`zero_grad`, or until an optimizer steps for the second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hubring.workers.reducer.backward import BackwardPasses

if TYPE_CHECKING:
    from hubring.workers.reducer.reducer import Owner, Reducer


class ReducerSet:
    """Reducers that are exchanged together.

    Attributes:
        reducers: The reducers, in the order in which they were made.
        passes: Follows their backward passes.
    """

    def __init__(self) -> None:
        self.reducers: list[Reducer] = []
        self.passes = BackwardPasses(self)
        self._stepped: list[Owner] = []
        """The optimizers that have stepped in this turn."""

    @property
    def owners(self) -> list[Owner]:
        """The newest optimizer of each reducer, each once."""
        return list({id(reducer.owner): reducer.owner for reducer in self.reducers}.values())

    def include(self, reducer: Reducer) -> None:
        """Exchanges a reducer with the others from now on, also in a pass that is open."""
        reducer.together = self
        self.reducers = sorted([*self.reducers, reducer], key=lambda one: one.number)
        if self.passes.is_open:
            self.passes.begin(reducer)

    def absorb(self, other: ReducerSet) -> None:
        """Exchanges the reducers of another set with these."""
        reducers, other.reducers = other.reducers, []
        self._stepped += other._stepped
        for reducer in reducers:
            self.include(reducer)

    # Turns.

    def begin_turn(self, *, anyway: bool = False) -> None:
        """Prepares for the next gradients, if an optimizer has stepped with these; `anyway`: in any case."""
        if not anyway and not self._stepped:
            return
        for reducer in self.reducers:
            reducer.reset()
        self.passes.reset()
        self._stepped.clear()

    def begin_step(self, owner: Owner) -> None:
        """Prepares for a step. One without a backward since the last exchanges the gradients again."""
        if any(one is owner for one in self._stepped):
            self.begin_turn()

    def note_step(self, owner: Owner) -> None:
        """Records that an optimizer has stepped, or skipped its step."""
        self._stepped.append(owner)

    # Sending and waiting.

    def send_ready(self) -> None:
        """Sends the groups that are complete and next in order."""
        for reducer in self.reducers:
            reducer.exchange.send_ready()
            if not reducer.on_server and not reducer.exchange.complete:
                return

    def backward_ended(self) -> None:
        """Sends what is not to wait for `step()`, and waits for means that the script may use now.

        Raises:
            HubringError: The exchange failed.
        """
        leaving = [reducer.overlap.leaves_after_backward for reducer in self.reducers]
        for place, reducer in enumerate(self.reducers):
            if leaving[place] or (not reducer.on_server and any(leaving[place:])):
                reducer.exchange.send_rest()
        for reducer in self.reducers:
            if reducer.overlap.waits_after_backward:
                reducer.exchange.finish()

    def finish(self) -> None:
        """Sends what is left to send, and waits for everything. Raises as `Exchange.finish`."""
        for reducer in self.reducers:
            reducer.overlap.check()
        for reducer in self.reducers:
            reducer.exchange.send_rest()
        for reducer in self.reducers:
            reducer.exchange.finish()

    def complete_passes(self) -> None:
        """Exchanges what fewer backward passes than a step needs have brought, where workers step."""
        if self.passes.count and not any(one.on_server or one.exchange.begun for one in self.reducers):
            self.finish()
