"""Horovod's API for Keras 3 on torch: `import hubring.horovod.keras as hvd`.

The code is in `workers/horovod/keras.py`.
"""

from hubring.workers.horovod.keras import *  # noqa: F403
