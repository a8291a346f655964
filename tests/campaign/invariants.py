"""The invariants I1 to I8 as pure checks, and what makes a run valid.

Each check takes the evidence of a run and returns what violates it, in words. `goes on` has no number: a
fault that takes no program away must not end one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from tests.campaign import ledger
from tests.campaign.evidence import Act, Evidence, State
from tests.campaign.ledger import ROUNDING
from tests.campaign.resources import growth
from tests.campaign.scenario import STEPS, TIMEOUT

Check = Callable[[Evidence], list[str]]

LEAST_STEPS = 20
"""Steps of all workers together, at least."""
LEAST_BYTES = 1000
"""Bytes that pass the relays before a fault on the wire counts."""
GRACE = 1.0
"""Seconds by which a call may outlive its deadline."""

MOST_FINDINGS = 2
"""Findings that are listed for each holder of parameters."""

CODES = {0, 1, 69, 75, 78}
PEER = re.compile(r"rank \d|shard|server|coordinator|\d+\.\d+\.\d+\.\d+:\d+|safetensors|manifest|checkpoint")
CAUSE = re.compile(
    r"kill|suspend|disconnect|lost|stop|end|left|answer|heartbeat|close|digest|bytes|read|cannot|not |exit",
    re.I,
)
RETRY = re.compile(r"restart|start |check|use |try|free|wait|rejoin|resume|see |increase|set ", re.I)


def valid(evidence: Evidence) -> list[str]:
    """A run counts only if its fault fired, on a job that worked."""
    found = [] if evidence.fired else ["the fault did not fire"]
    steps = sum(len(trail.looks) for trail in evidence.acts[0].trails.values())
    if steps < LEAST_STEPS:
        found.append(f"the workers took {steps} steps, expected {LEAST_STEPS} or more")
    if evidence.scenario.place in ("data", "control") and evidence.forwarded < LEAST_BYTES:
        found.append(f"{evidence.forwarded} bytes passed the relays, expected {LEAST_BYTES} or more")
    return found


def goes_on(evidence: Evidence) -> list[str]:
    """Who must finish does: all but the victim, or all in the job that resumes.

    With standbys the loss of a process of the server ends none, since no second job follows it.
    """
    scenario, act = evidence.scenario, evidence.last
    if scenario.resumes and act.server.code == 78 and evidence.checkpoints == 1:
        return []  # the only checkpoint is damaged, and the server refuses it
    spared = scenario.loses_a_worker and not scenario.resumes
    in_its_place = act.summary.get("failovers", 0)
    found = ["no standby took the victim's place"] if scenario.fails_over and not in_its_place else []
    return found + [
        f"{program.name} exited with {program.code}: {program.error or _last_line(program.said)}"
        for program in act.programs
        if program.code != 0 and not (program.victim and spared)
    ]


def i1_nothing_acknowledged_is_lost(evidence: Evidence) -> list[str]:
    scenario, act = evidence.scenario, evidence.last
    if scenario.mode == "backup" or (act.checkpoint is None and not act.states):
        return []
    acknowledged = {(look.step, trail.rank) for trail in act.trails.values() for look in trail.looks}
    states = {"checkpoint": act.checkpoint} if act.checkpoint is not None and act.server.code == 0 else {}
    if scenario.synchronous:
        states |= act.states
    return _each(states, lambda state: ledger.missing(state["ledger"], acknowledged))


def i2_nothing_is_applied_twice(evidence: Evidence) -> list[str]:
    scenario = evidence.scenario
    backup, rounds_of_one_step = scenario.mode == "backup", scenario.synchronous
    found, ahead = [], 0
    for act in evidence.acts:
        for name, state in (_saved(act) | dict(act.states)).items():
            values = state["ledger"]
            wrong = ledger.foreign(values, STEPS)
            if backup:
                rounds = act.checkpoint_rounds + ahead if name == "checkpoint" else -1
                wrong += ledger.counted_wrongly(values, STEPS, rounds)
            else:
                wrong += ledger.applied_wrongly(values, STEPS, mean=rounds_of_one_step)
            if rounds_of_one_step and name in act.states:
                wrong += ledger.unfilled(values, STEPS)
            found += _few(name, wrong)
        ahead += act.checkpoint_rounds - act.checkpoint_step  # a job that resumes counts from the step
    return found


def i3_a_synchronous_run_ends_in_the_same_bytes(evidence: Evidence) -> list[str]:
    scenario, reference = evidence.scenario, evidence.reference
    if reference is None or (scenario.loses_a_worker and not (scenario.resumes or scenario.starts)):
        return []
    act = evidence.last
    states = dict(act.states)
    if act.server.code == 0 and act.checkpoint_step == STEPS:
        states |= _saved(act)

    def differing(state: State) -> list[str]:
        names = [name for name in reference if not torch.equal(state[name], reference[name])]
        return [f"{', '.join(names)} differ from the undisturbed run"] if names else []

    return _each(states, differing)


def i4_no_call_outlives_its_deadline(evidence: Evidence) -> list[str]:
    limit = TIMEOUT + GRACE + evidence.paused
    found = []
    for act in evidence.acts:
        found += [f"{program.name} still ran at the end" for program in act.programs if program.code is None]
        found += [
            f"{name} took {look.seconds:.1f} s for step {look.step}, the limit is {limit:.1f} s"
            for name, trail in act.trails.items()
            for look in trail.looks
            if look.seconds > limit
        ]
    return found


def i5_errors_name_peer_cause_and_fix(evidence: Evidence) -> list[str]:
    found = []
    for program in (program for act in evidence.acts for program in act.programs):
        if "Traceback" in program.said:
            found.append(f"{program.name} prints a traceback that ends with {_raised(program.said)!r}")
        if not program.failed or program.code == 75:
            continue
        error = program.error or _last_line(program.said)
        lacks = [
            what
            for what, words in (("peer", PEER), ("cause", CAUSE), ("fix", RETRY))
            if not words.search(error)
        ]
        if lacks:
            found.append(f"{program.name}'s error lacks {', '.join(lacks)}: {error!r}")
    return found


def i6_resources_return(evidence: Evidence) -> list[str]:
    return [
        f"{name}: {more}"
        for name, before in evidence.before.items()
        if name in evidence.after
        for more in growth(before, evidence.after[name])
    ]


def i7_reads_never_go_backward(evidence: Evidence) -> list[str]:
    found = []
    for act in evidence.acts:
        for name, trail in act.trails.items():
            found += [
                f"{name} read {look.backward} lower values after step {look.step}"
                for look in trail.looks
                if look.backward
            ]
            if evidence.scenario.mode != "backup":
                found += [
                    f"{name} does not see its own push of step {look.step}"
                    for look in trail.looks
                    if look.seen[trail.rank] < _own(look.step, act, evidence)
                ]
    return found


def i8_one_verdict(evidence: Evidence) -> list[str]:
    found = []
    for act in evidence.acts:
        found += [
            f"{program.name} exited with {program.code}, which no page documents"
            for program in act.programs
            if program.code is not None and program.code not in CODES and not program.victim
        ]
        finished = act.summary.get("finished", [])
        for worker in act.workers:
            rank = int(worker.name.split("-")[1])  # a replacement that comes late takes no step
            if worker.code == 0 and act.server.code != 0 and not act.server.victim:
                found.append(f"{worker.name} exited with 0, the server with {act.server.code}")
            if worker.code == 0 and act.server.code == 0 and rank not in finished:
                found.append(f"{worker.name} exited with 0, but the server's result does not list it")
            if worker.failed and not worker.victim and act.server.code == 0:
                found.append(f"the server exited with 0, {worker.name} with {worker.code}")
        if act.server.code == 0 and evidence.scenario.at_hub:
            found += _last_checkpoint(act, evidence)
    return found


def _last_checkpoint(act: Act, evidence: Evidence) -> list[str]:
    """The server acknowledged the end, so its last checkpoint must be there, and hold all pushes."""
    if act.checkpoint is None:
        return ["the server exited with 0, but there is no checkpoint"]
    if evidence.scenario.mode == "bsp" and act.checkpoint_step != STEPS:
        return [f"the server exited with 0, but its last checkpoint has step {act.checkpoint_step}"]
    saved = act.checkpoint["ledger"]
    return [
        f"the server exited with 0, but its last checkpoint lacks what {name} has at the end"
        for name, state in act.states.items()
        if (state["ledger"] > saved + ROUNDING).any()
    ]


CHECKS: Mapping[str, Check] = {
    "valid": valid,
    "goes on": goes_on,
    "I1": i1_nothing_acknowledged_is_lost,
    "I2": i2_nothing_is_applied_twice,
    "I3": i3_a_synchronous_run_ends_in_the_same_bytes,
    "I4": i4_no_call_outlives_its_deadline,
    "I5": i5_errors_name_peer_cause_and_fix,
    "I6": i6_resources_return,
    "I7": i7_reads_never_go_backward,
    "I8": i8_one_verdict,
}


def violations(evidence: Evidence) -> dict[str, list[str]]:
    """Returns what violates each invariant; invariants that hold are left out."""
    return {name: found for name, check in CHECKS.items() if (found := check(evidence))}


def _each(states: Mapping[str, State], check: Callable[[State], list[str]]) -> list[str]:
    """Checks the parameters of each holder."""
    return [each for name, state in states.items() for each in _few(name, check(state))]


def _few(name: str, wrong: list[str]) -> list[str]:
    more = [f"{name}: {len(wrong) - MOST_FINDINGS} more"] if len(wrong) > MOST_FINDINGS else []
    return [*(f"{name}: {each}" for each in wrong[:MOST_FINDINGS]), *more]


def _saved(act: Act) -> dict[str, State]:
    return {} if act.checkpoint is None else {"checkpoint": act.checkpoint}


def _own(step: int, act: Act, evidence: Evidence) -> int:
    """Returns how many of its own pushes a worker must see after this step."""
    late = any(program.late for program in act.programs)
    resumed = evidence.scenario.resumes and not evidence.scenario.synchronous
    return 1 if late or resumed else step + 1


def _raised(said: str) -> str:
    """Returns the last line of the first traceback; a log's prefix may stand before each line."""
    lines = said.partition("Traceback (")[2].splitlines()[1:]
    texts = [line.partition(" | ")[2] or line for line in lines]
    return next((text for text in texts if text and not text.startswith(" ")), "nothing")


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["nothing"])[-1]
