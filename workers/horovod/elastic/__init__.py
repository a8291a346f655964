"""Elastic training: workers can leave, and new workers can take their ranks, while a job runs.

Elastic training needs a hub that was started with `--on-loss drop` (the default). The job starts with all N
ranks, and never has more. After a worker is lost or leaves, rounds close without it. The other workers
notice at the next `commit` or `check_host_updates`: `HorovodInternalError` is raised, they return to the
last commit, and continue without the worker. A new worker for a free rank also waits for the next `commit`
or `check_host_updates`, and then gets the state of the others.

A ring needs `--min-workers`: otherwise a lost worker ends the job. The ring then works as above. It runs an
operation again that loses a worker, so what the script notices is the same as on a hub.
"""

from __future__ import annotations

from hubring.workers.horovod.elastic import sampler as sampler
from hubring.workers.horovod.elastic import state as state
from hubring.workers.horovod.elastic.sampler import ElasticSampler as ElasticSampler
from hubring.workers.horovod.elastic.state import ObjectState as ObjectState
from hubring.workers.horovod.elastic.state import State as State
from hubring.workers.horovod.elastic.state import TorchState as TorchState
from hubring.workers.horovod.elastic.state import run as run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "sampler", "state"]
