"""Horovod's names on Hubring's topologies: `import hubring.horovod as hvd`.

The code is in `workers/horovod/`.
"""

from hubring.workers.horovod import *  # noqa: F403
from hubring.workers.horovod import __version__ as __version__
