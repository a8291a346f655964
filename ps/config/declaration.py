"""Declares a setting once: a field of a config, with a `Flag` in its type.

    lease: Annotated[Seconds, cluster("seconds without a heartbeat before a worker is lost")] = 90.0

The field defines `--lease`, `PS_LEASE`, `lease` in TOML, the line in `--help` and the row in
deploy/SETTINGS.md. The settings of a program's own certificate are here too, because servers and workers
share them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from msgspec import Struct
from msgspec.structs import FieldInfo, asdict, fields

from hubring.ps.core.errors import ConfigError


def flag(name: str) -> str:
    """Returns the flag that sets this field."""
    return "--" + name.replace("_", "-")


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings, by field name, as flags of a command line."""
    words = []
    for name, value in settings.items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return words


def changed_settings(config: Struct) -> dict[str, Any]:
    """Returns the settings that differ from their defaults, by field name."""
    defaults = {field.name: field.default for field in fields(config)}
    return {name: value for name, value in asdict(config).items() if value != defaults[name]}


def only_with(given: str, needed: str, present: str) -> ConfigError:
    """Makes the error for setting `given`, which requires `needed` but is combined with `present`."""
    return ConfigError(f"{given} requires {needed}, not {present}; change one of the two")


Group = Literal["cluster", "data path", "checkpoint", "debugging"]


class Flag(NamedTuple):
    """The documentation of a setting."""

    group: Group
    """Heading in `--help`."""
    help: str
    """One line in plain English."""
    default: str = ""
    """The effective default in words, if the field's default value does not show it."""
    hidden: bool = False
    """Whether `--help` omits the setting."""


cluster = partial(Flag, "cluster")
data_path = partial(Flag, "data path")
checkpoint = partial(Flag, "checkpoint")
debugging = partial(Flag, "debugging")


def declared_settings(
    config: type[Struct], names: Collection[str] | None = None
) -> Sequence[tuple[FieldInfo, Flag]]:
    """Returns the settings of a config, sorted by group; with `names`, only these."""
    found = {field.name: field for field in fields(config)}
    chosen = [found[name] for name in (found if names is None else names)]
    pairs = [(field, part) for field in chosen for part in get_args(field.type) if isinstance(part, Flag)]
    return sorted(pairs, key=lambda pair: get_args(Group).index(pair[1].group))


def default_in_words(field: FieldInfo, flag: Flag) -> str:
    """Returns the default in words; empty if the default is None, False or an empty tuple."""
    value = field.default
    if flag.default or value is None or value is False or value == ():
        return flag.default
    return f"{value:g}" if isinstance(value, float) else str(value)


CertificateFile = Annotated[
    Path | None, cluster("PEM file with this program's certificate, if the server is not to make one")
]
KeyFile = Annotated[Path | None, cluster("PEM file with the private key of --tls-cert")]
AuthorityFile = Annotated[
    Path | None,
    cluster(
        "PEM file with the authority that signs all certificates of the job", "the token proves the server"
    ),
]


class TlsFiles(NamedTuple):
    """Files with a certificate of a program's own.

    Attributes:
        cert: The certificate.
        key: Its private key.
        ca: The authority whose certificates the program accepts.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __bool__(self) -> bool:
        return any(file is not None for file in self)

    def check(self, *, insecure: bool = False) -> None:
        """Checks that certificate and key come together, and not with `--insecure`.

        Raises:
            ConfigError: One of them is missing, or nothing is encrypted.
        """
        if (self.cert is None) != (self.key is None):
            given, missing = ("--tls-cert", "--tls-key") if self.key is None else ("--tls-key", "--tls-cert")
            raise ConfigError(
                f"{given} {self.cert or self.key} needs {missing} FILE: a certificate works only with its"
                " private key"
            )
        if insecure and self:
            raise ConfigError("--tls-cert and --tls-ca are for encryption; --insecure encrypts nothing")


NO_FILES = TlsFiles()
