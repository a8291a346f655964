"""Horovod's API on a hub or a ring: `import hubring.horovod as hvd`.

The code is in `workers/horovod/`.
"""

from hubring.workers.horovod import *  # noqa: F403
from hubring.workers.horovod import __version__ as __version__
