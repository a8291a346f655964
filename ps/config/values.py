"""Kinds of values that settings have: numbers and names within limits, file names, addresses.

A setting that names a file must not hold the file's content, as in `PS_TOKEN_FILE="$(cat FILE)"`.

Law: no error message repeats what may be a secret.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from hubring.ps.core.errors import ConfigError

LAST_PORT = 65535
Port = Annotated[int, Meta(ge=0, le=LAST_PORT, description="a port from 0 to 65535; 0 picks a free one")]
Count = Annotated[int, Meta(ge=1, description="a whole number, at least 1")]
Whole = Annotated[int, Meta(ge=0, description="a whole number, at least 0")]
Bytes = Annotated[int, Meta(ge=8, description="bytes, at least 8")]
Seconds = Annotated[float, Meta(gt=0, le=1e7, description="seconds, above 0 and at most 1e7")]
LogFormat = Literal["text", "json"]
DeviceName = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$", description="cpu, cuda or cuda:N")]
ReportTo = Annotated[
    str, Meta(pattern=r"^(tensorboard|wandb):.", description="tensorboard:FOLDER or wandb:PROJECT")
]
JobName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?\Z",
        description="at most 40 lower-case letters, digits and -, beginning with a letter",
    ),
]
Image = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*\Z",
        description="an image, such as registry.example/hubring:1",
    ),
]
Partition = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.,-]+\Z", description="comma-separated names of partitions")
]
Duration = Annotated[
    str,
    Meta(
        pattern=r"^(?![-0:]+\Z)([0-9]{1,3}-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]\Z",
        description="[DAYS-]HOURS:MINUTES:SECONDS, such as 1-12:00:00",
    ),
]
DirectiveLine = Annotated[
    str, Meta(pattern=r"^#SBATCH --[^\r\n]+\Z", description="one line that begins with #SBATCH --")
]


HIDDEN_VALUE = "..."
"""Stands for a value in an error message."""

_SECRETS = ("hubring:", "-----BEGIN")
_MOST_BYTES, _MOST_IN_NAME = 4095, 255
"""PATH_MAX without its last byte, and NAME_MAX of all common file systems."""


def is_secret(text: str) -> bool:
    """Returns whether a text begins as a token, a private key or a certificate does."""
    return text.lstrip().startswith(_SECRETS)


def shown_value(value: object) -> object:
    """Returns a value for an error message: itself, unless it may be a secret."""
    return HIDDEN_VALUE if isinstance(value, str) and (is_secret(value) or "\n" in value) else value


def file_name_objection(text: str) -> str:
    """Returns why a text cannot be the name of a file, and the fix, without the text; empty if it can."""
    parts = text.encode(errors="surrogateescape").split(b"/")
    if is_secret(text):
        why = "is the content of a file"
    elif "\n" in text or "\0" in text:
        why = "has several lines"
    elif len(text) > _MOST_BYTES or max(map(len, parts)) > _MOST_IN_NAME:
        why = "is too long for the name of a file"
    else:
        return ""
    return f"the value, which is not repeated here, {why}; pass the name of the file"


_ADDRESS = re.compile(r"(\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<name>[^\[\]:/@\s]+)):(?P<port>[0-9]{1,5})")


def address(text: str) -> tuple[str, int]:
    """Splits `HOST:PORT`. An IPv6 host is in brackets: `[::1]:5555`.

    Raises:
        ConfigError: `text` is not `HOST:PORT`, or the port is not from 1 to 65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= LAST_PORT:
        raise ConfigError(
            f"address {shown_value(text)!r}: expected HOST:PORT with a port from 1 to 65535, "
            "as in 127.0.0.1:5555 or [::1]:5555"
        )
    return match["six"] or match["name"], int(match["port"])


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can connect to a listener on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def write_address_file(path: Path, address: str) -> None:
    """Writes a server's `HOST:PORT`; a reader never sees a partial file.

    Raises:
        ConfigError: The file cannot be written.
    """
    # In a folder like /tmp, other users could take a name that they can guess, and keep it.
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        with fresh.open("x") as file:
            file.write(address + "\n")
        fresh.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise ConfigError(
            f"cannot write --address-file {path}: {error.strerror}; use a path in a writable folder"
        ) from error
