"""The settings of a program with a certificate of its own, which servers and workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from hubring.ps.config.declaration import cluster
from hubring.ps.core.errors import ConfigError

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

    def check(self) -> None:
        """Checks that certificate and key come together.

        Raises:
            ConfigError: One of them is missing.
        """
        if (self.cert is None) != (self.key is None):
            given, missing = ("--tls-cert", "--tls-key") if self.key is None else ("--tls-key", "--tls-cert")
            raise ConfigError(
                f"{given} {self.cert or self.key} needs {missing} FILE: a certificate works only with its"
                " private key"
            )


NO_FILES = TlsFiles()
