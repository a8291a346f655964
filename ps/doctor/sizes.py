"""Bytes as people read them."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def spelt(nbytes: float) -> str:
    """To three digits, in the largest unit of which there is one."""
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= size:
            count = nbytes / size
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
