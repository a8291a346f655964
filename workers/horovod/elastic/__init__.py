"""Elastic training: workers may go, and others come in their place, while a job runs.

On a hub that was started with `--on-loss drop` (its default). The job has N
places, all of which are held when it begins; there are never more. A worker
that is lost, or leaves, is missed at the next `commit` or `check_host_updates`:
until then rounds close without it. `HorovodInternalError` then takes the others
back to their last commit, and they go on without it. A worker that is started
in its place waits for such a moment too, and gets the others' state.

Around a ring the workers stay the same: who is lost ends the job.
"""

from __future__ import annotations

from hubring.workers.horovod.elastic.run import run as run
from hubring.workers.horovod.elastic.sampler import ElasticSampler as ElasticSampler
from hubring.workers.horovod.elastic.state import ObjectState as ObjectState
from hubring.workers.horovod.elastic.state import State as State
from hubring.workers.horovod.elastic.torch_state import TorchState as TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
