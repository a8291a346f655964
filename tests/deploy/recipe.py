"""The Compose file as a test reads it: with its defaults in the place of what the environment may say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
DOCKERFILE = DEPLOY / "Dockerfile"

_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def recipe(path: Path = COMPOSE) -> dict[str, Any]:
    """What the file says, where no variable is set."""
    found: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(r"\2", path.read_text()))
    return found


def variables(path: Path = COMPOSE) -> dict[str, set[str]]:
    """The variables that a file asks for, with the defaults that it gives them."""
    found: dict[str, set[str]] = {}
    for name, default in _VARIABLE.findall(path.read_text()):
        found.setdefault(name, set()).add(default)
    return found


def services(path: Path = COMPOSE) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = recipe(path)["services"]
    return found


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's lines, continued ones joined: instruction and what follows it."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in pairs]
