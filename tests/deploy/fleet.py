"""A Compose project on an engine, and what its containers do, say and print."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.deploy.engine import Engine, until
from tests.deploy.image import BASE, IMAGE

NUMBER = "com.docker.compose.container-number"
Container = dict[str, Any]
"""What `docker inspect` tells of it."""


class Fleet:
    """One project, as the recipe has it.

    Args:
        engine: Where it runs.
        source: The folder that is like a clone.
        name: The project's.
        file: Its Compose file; None for the recipe's.
        variables: What the Compose file finds in its environment.
    """

    def __init__(
        self, engine: Engine, source: Path, name: str, *, file: Path | None = None, **variables: str
    ) -> None:
        self._engine = engine
        self._variables = {"BASE_IMAGE": BASE, "IMAGE": IMAGE, **variables}
        file = file or source / "deploy" / "compose.yaml"
        self._compose = ["compose", "--project-name", name, "--file", str(file)]

    def run(self, *arguments: str) -> str:
        """What `docker compose` prints; it has to succeed."""
        return self._engine.run(*self._compose, *arguments, **self._variables)

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._engine.ask(*self._compose, *arguments, **self._variables)

    def containers(self, service: str) -> list[Container]:
        """A service's containers, in the order of their numbers."""
        ids = self.run("ps", "--all", "--quiet", service).split()
        found: list[Container] = json.loads(self._engine.run("inspect", *ids)) if ids else []
        return sorted(found, key=lambda one: int(one["Config"]["Labels"][NUMBER]))

    def networks(self, service: str) -> list[dict[str, Any]]:
        """The networks that a service's containers are in."""
        names = {name for one in self.containers(service) for name in one["NetworkSettings"]["Networks"]}
        found: list[dict[str, Any]] = json.loads(self._engine.run("network", "inspect", *sorted(names)))
        return found

    def status(self) -> dict[str, Any]:
        """How the server is doing; empty where it does not answer, as while it starts."""
        asked = self.ask("exec", "-T", "server", "ps-server", "status", "127.0.0.1:5555")
        found: dict[str, Any] = json.loads(asked.stdout) if asked.returncode == 0 else {}
        return found

    def kill(self, container: Container) -> None:
        self._engine.run("kill", container["Id"])

    def result(self, container: Container) -> dict[str, Any]:
        """The last line of a container's standard output."""
        lines = self._engine.run("logs", container["Id"]).splitlines()
        assert lines, f"{container['Name']} printed nothing:\n{self.said()}"
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def said(self, *services: str) -> str:
        """What containers said and printed."""
        return self.run("logs", "--no-color", *services)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what, lambda: self.said()[-8000:])

    def until_step(self, step: int) -> None:
        """Waits until all workers have completed this step."""
        self.until(lambda: bool(self.status().get("step", 0) >= step), f"step {step}")

    def down(self) -> None:
        """Removes its containers, networks and volumes."""
        self.run("--profile", "*", "down", "--volumes", "--timeout", "1")


def results(output: str) -> list[dict[str, Any]]:
    """The results among what containers printed, behind their names."""
    return [json.loads(line[line.index("{") :]) for line in output.splitlines() if '"exit_code"' in line]
