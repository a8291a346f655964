"""Whether compiled loops (`hubring.ps.optim.llvm_loops`) work on this host. If not, torch's kernels are used.

Loops need llvmlite, which the extra `fast` installs. It is imported only by the first call of `work`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from functools import cache

from hubring.ps.core.extras import how_to_install

log = logging.getLogger(__name__)

LANES = 16
"""Elements of a vector: 64 bytes, a cache line. On processors with shorter vectors, several make one."""


@cache
def work() -> bool:
    """Returns whether loops can be compiled and run on this host; logs the reason if not."""
    try:
        import llvmlite.binding  # noqa: F401
    except ImportError:
        log.info("optimizers use torch's slower kernels: %s", how_to_install("llvmlite"))
        return False
    if not _may_run():
        log.warning("this process cannot run generated code; optimizers use torch's slower kernels")
        return False
    from hubring.ps.optim.llvm_loops import Loop

    try:
        Loop(1, 1, (), lambda at, own, read, _: [at.add(own[0], read[0])])
    except (RuntimeError, OSError) as error:
        log.warning("LLVM cannot compile loops (%s); optimizers use torch's slower kernels", error)
        return False
    return True


def _may_run() -> bool:
    """Returns whether this process may execute memory that it wrote; SELinux or systemd can forbid it."""
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE)) as page:
        byte = ctypes.c_char.from_buffer(page)
        allowed: int = libc.mprotect(ctypes.addressof(byte), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
        del byte  # the mapping cannot be closed while a reference exists
    return allowed == 0
