"""Types of settings that restrict Python's types."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535, description="a port from 0 to 65535; 0 picks a free one")]
Count = Annotated[int, Meta(ge=1, description="a whole number, at least 1")]
Whole = Annotated[int, Meta(ge=0, description="a whole number, at least 0")]
Bytes = Annotated[int, Meta(ge=8, description="bytes, at least 8")]
Seconds = Annotated[float, Meta(gt=0, le=1e7, description="seconds, above 0 and at most 1e7")]
LogFormat = Literal["text", "json"]
DeviceName = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$", description="cpu, cuda or cuda:N")]
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
