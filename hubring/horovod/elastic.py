"""Horovod's elastic training: `from hubring.horovod.elastic import run`.

The code is in `workers/horovod/elastic/`.
"""

from hubring.workers.horovod.elastic import *  # noqa: F403
