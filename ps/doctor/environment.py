"""Settings in the environment: each known and of a value that is allowed, and none against another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hubring.ps.config.sources import faults, load_server, load_worker
from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.subject import Subject

NAME = "settings"


def judge(wrong: Mapping[str, str], contradiction: str, given: list[str]) -> list[Finding]:
    """One finding for all, or one for each place that is wrong.

    Args:
        wrong: What is wrong, by the name of the variable or flag.
        contradiction: What the settings together come to; empty if that is nothing wrong.
        given: All variables of ours that are set.
    """
    if wrong:
        return [failure(NAME, text, f"correct it, or leave {name} out") for name, text in wrong.items()]
    if contradiction:
        mend = "unset one of them; or give the flag, which stands over the environment and the file"
        return [warning(NAME, contradiction, mend)]
    return [ok(NAME, f"{', '.join(given)}: known and allowed" if given else "no PS_* variable is set")]


def examine(subject: Subject) -> Iterator[Finding]:
    """Reads the environment, and the file that it or a flag names."""
    variables = subject.variables
    given = sorted(name for name in variables if name.startswith("PS_"))
    wrong = faults(variables)
    if subject.config_file is not None:
        wrong |= _fault(subject.config_file)
    yield from judge(wrong, "" if wrong else _contradiction(subject), given)


def _fault(file: Path) -> dict[str, str]:
    """What is wrong with the file by itself."""
    try:
        load_server({}, file, {})
    except ConfigError as error:
        return {"--config": str(error)}
    return {}


def _contradiction(subject: Subject) -> str:
    """What the programs would say at their start, were a worker told of some server."""
    flags = {} if "PS_SERVER" in subject.variables else {"server": subject.server or "127.0.0.1:5555"}
    try:
        load_server({}, subject.config_file, subject.variables)
        load_worker(flags, subject.config_file, subject.variables)
    except ConfigError as error:
        return str(error)
    return ""
