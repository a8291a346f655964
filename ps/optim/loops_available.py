"""Whether compiled loops (`hubring.ps.optim.llvm_loops`) serve here; where they do not, torch's kernels do.

Loops need llvmlite, which the extra `fast` installs. Nothing imports it before the first question.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from functools import cache

log = logging.getLogger(__name__)

LANES = 16
"""Elements of a vector: 64 bytes, a cache line. Where the processor's are shorter, several make one."""


@cache
def work() -> bool:
    """Whether loops can be made and run here; the log says why where they cannot."""
    try:
        import llvmlite.binding  # noqa: F401
    except ImportError:
        log.info(
            "llvmlite is not installed (pip install 'hubring[fast]'): torch's kernels serve, in more passes"
        )
        return False
    if not _may_run():
        log.warning("this process may not run what it has written: torch's kernels serve, in more passes")
        return False
    from hubring.ps.optim.llvm_loops import Loop

    try:
        Loop(1, 1, (), lambda at, own, read, _: [at.add(own[0], read[0])])
    except (RuntimeError, OSError) as error:
        log.warning("LLVM makes no loops here (%s): torch's kernels serve, in more passes", error)
        return False
    return True


def _may_run() -> bool:
    """Whether this process may run what it has written; hardened systems forbid it (SELinux, systemd)."""
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE)) as page:
        byte = ctypes.c_char.from_buffer(page)
        allowed: int = libc.mprotect(ctypes.addressof(byte), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
        del byte  # the mapping cannot be closed while it is looked at
    return allowed == 0
