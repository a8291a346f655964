"""Collectives for scripts: every member takes part, and each gets its result.

Ranks are matched by name, and the calls under one name in the order in which
each rank makes them; calls of different names may come in different orders.
Without a name it is the operation's: ranks must then make the same calls in the
same order. All take these arguments besides their own:

    name            what ranks are matched by
    group           who takes part, from `new_group`; None: all ranks
    communicator    None: that of `workers.init()`

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

from workers.collectives.broadcasts import broadcast as broadcast
from workers.collectives.broadcasts import broadcast_ as broadcast_
from workers.collectives.broadcasts import broadcast_async as broadcast_async
from workers.collectives.broadcasts import broadcast_async_ as broadcast_async_
from workers.collectives.broadcasts import broadcast_into as broadcast_into
from workers.collectives.broadcasts import scatter as scatter
from workers.collectives.broadcasts import scatter_async as scatter_async
from workers.collectives.gatherings import allgather as allgather
from workers.collectives.gatherings import allgather_async as allgather_async
from workers.collectives.gatherings import alltoall as alltoall
from workers.collectives.gatherings import alltoall_async as alltoall_async
from workers.collectives.gatherings import gather as gather
from workers.collectives.gatherings import gather_async as gather_async
from workers.collectives.gatherings import grouped_allgather as grouped_allgather
from workers.collectives.gatherings import grouped_allgather_async as grouped_allgather_async
from workers.collectives.meetings import barrier as barrier
from workers.collectives.meetings import barrier_async as barrier_async
from workers.collectives.meetings import join as join
from workers.collectives.meetings import join_async as join_async
from workers.collectives.meetings import new_group as new_group
from workers.collectives.meetings import remove_group as remove_group
from workers.collectives.partial_reductions import grouped_reduce_scatter as grouped_reduce_scatter
from workers.collectives.partial_reductions import (
    grouped_reduce_scatter_async as grouped_reduce_scatter_async,
)
from workers.collectives.partial_reductions import reduce as reduce
from workers.collectives.partial_reductions import reduce_async as reduce_async
from workers.collectives.partial_reductions import reduce_scatter as reduce_scatter
from workers.collectives.partial_reductions import reduce_scatter_async as reduce_scatter_async
from workers.collectives.reductions import allreduce as allreduce
from workers.collectives.reductions import allreduce_ as allreduce_
from workers.collectives.reductions import allreduce_async as allreduce_async
from workers.collectives.reductions import allreduce_async_ as allreduce_async_
from workers.collectives.reductions import grouped_allreduce as grouped_allreduce
from workers.collectives.reductions import grouped_allreduce_ as grouped_allreduce_
from workers.collectives.reductions import grouped_allreduce_async as grouped_allreduce_async
from workers.collectives.reductions import grouped_allreduce_async_ as grouped_allreduce_async_
from workers.collectives.transfers import recv as recv
from workers.collectives.transfers import recv_async as recv_async
from workers.collectives.transfers import send as send
from workers.collectives.transfers import send_async as send_async
