"""The part of `horovod.run` that runs in the workers."""

from __future__ import annotations

from typing import Any

import cloudpickle

from hubring.workers.horovod import alias


def call(pickled: bytes) -> Any:
    """Provides Horovod's names, which are needed to unpickle the function, then calls it."""
    alias.install()
    function, args, kwargs = cloudpickle.loads(pickled)
    return function(*args, **kwargs)
