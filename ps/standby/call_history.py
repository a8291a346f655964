"""The coordinator's calls of the current job, for a standby that follows from the middle of it."""

from __future__ import annotations

from hubring.protos import control_pb2 as pb
from hubring.ps.core.messages import Command, CoordinatorCall


def without_checkpoint(call: CoordinatorCall) -> tuple[CoordinatorCall, list[int]]:
    """Returns a plan for a standby, and the keys whose restored state must follow it."""
    plan = pb.ShardAssignment.FromString(call.message)
    restored = [piece.key for piece in plan.slices] if plan.restore else []
    plan.restore = ""
    return CoordinatorCall(call.command, plan.SerializeToString()), restored


class CallHistory:
    """Keeps the calls that made a store what it is, besides what its workers sent."""

    def __init__(self) -> None:
        self._plans: list[CoordinatorCall] = []
        self._last: dict[Command, CoordinatorCall] = {}

    def note(self, call: CoordinatorCall) -> None:
        """Notes a call that the store has carried out."""
        if call.command is Command.RESET:
            self._plans.clear()
            self._last.clear()
        elif call.command is Command.SET_PLAN:
            plan, _ = without_checkpoint(call)
            if not pb.ShardAssignment.FromString(plan.message).extends:
                self._plans.clear()
            self._plans.append(plan)
        elif call.command is not Command.CONFIRM:
            self._last[call.command] = call

    def calls(self) -> list[CoordinatorCall]:
        """Returns the calls to repeat, in an order that fits: plans, the last view, and what ends the job."""
        order = (Command.SET_VIEW, Command.DRAIN, Command.FAIL)
        return [*self._plans, *(self._last[command] for command in order if command in self._last)]
