"""Collectives for scripts. Every member calls the collective, and each gets its result.

Calls are matched by name. Calls with one name are matched in order; calls with different
names may come in different orders. The default name is the operation's name: without
names, all ranks must make the same calls in the same order. All collectives have these
arguments:

    name            the name that calls are matched by
    group           the members, from `new_group`; None: all ranks
    communicator    None: the communicator of `hubring.init()`

and raise:

    ConfigError         members pass different arguments, or the operation does not support
                        the dtype; all members get the same error, which names the ranks
    DeadlineExceeded    some member did not call in time
    UsageError          the call is invalid on this rank
    HubringError        the exchange failed

A `root` is a rank of the whole job. Tensors can be on any device. A result is a new tensor
on the device of the input; functions that end in `_` write the result to the input instead.
Functions that end in `_async` return a work at once: `wait()` for it from any thread and
read `result`, or call `get()`. Do not change the inputs before the work is done.
"""

from __future__ import annotations

from hubring.workers.collectives import groups, moving, reductions
from hubring.workers.collectives.groups import *  # noqa: F403
from hubring.workers.collectives.moving import *  # noqa: F403
from hubring.workers.collectives.reductions import *  # noqa: F403

__all__: list[str] = [*groups.__all__, *moving.__all__, *reductions.__all__]
