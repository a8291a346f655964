"""Collectives for scripts: every member takes part, and each gets its result.

Ranks are matched by name, and the calls under one name in the order in which
each rank makes them; calls of different names may come in different orders.
Without a name it is the operation's: ranks must then make the same calls in the
same order. All take these arguments besides their own:

    name            what ranks are matched by
    group           who takes part, from `new_group`; None: all ranks
    communicator    None: that of `hubring.init()`

and all raise:

    ConfigError         members disagree in what they do, or it cannot be done with
                        the dtype; the same on all, and it says who gave what
    DeadlineExceeded    some member did not take part in time
    UsageError          the call makes no sense on this rank alone
    HubringError        what the exchange failed with

A `root` is a rank of the whole job. Tensors may be on any device; results are
on that of what was given, and new, but in forms that end in `_`. Those that end
in `_async` return at once: `wait()` for the work, from any thread, then its
`result` is there, and `get()` does both. Until then the tensors that were given
are the exchange's: do not change them.
"""

from __future__ import annotations

from hubring.workers.collectives import (
    barriers,
    broadcasts,
    gatherings,
    partial_reductions,
    reductions,
    transfers,
)
from hubring.workers.collectives.barriers import *  # noqa: F403
from hubring.workers.collectives.broadcasts import *  # noqa: F403
from hubring.workers.collectives.gatherings import *  # noqa: F403
from hubring.workers.collectives.group import Group
from hubring.workers.collectives.partial_reductions import *  # noqa: F403
from hubring.workers.collectives.reductions import *  # noqa: F403
from hubring.workers.collectives.transfers import *  # noqa: F403

__all__ = ["Group"]
__all__ += broadcasts.__all__
__all__ += gatherings.__all__
__all__ += barriers.__all__
__all__ += partial_reductions.__all__
__all__ += reductions.__all__
__all__ += transfers.__all__
