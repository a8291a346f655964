"""The API of `horovod.torch` on a hub or a ring: `import hubring.horovod as hvd`.

A script with `import horovod.torch as hvd` runs without edits under `ps-worker --as-horovod SCRIPT`
(`hubring.workers.horovod.alias`). The differences from Horovod 0.28.1:

    frameworks        only PyTorch, and Keras 3 on it: `hubring.horovod.keras`
    MPI               not supported: mpi_built() and mpi_enabled() return False, mpi_threads_supported()
                      raises ValueError, and init(comm=) accepts only the list of all ranks
    launchers         ps-run and horovod.run start workers only on this machine
    Adasum            needs a power of 2 of ranks, like Horovod on the CPU
    process sets      you can add one at any time, without HOROVOD_DYNAMIC_PROCESS_SETS
    timeline          you can start it at any time; there are no cycles to mark, and on a hub no NEGOTIATE
                      events: only the server knows when all ranks are ready
    variables         HOROVOD_TIMELINE and HOROVOD_FUSION_THRESHOLD have an effect; HOROVOD_CYCLE_TIME and
                      HOROVOD_STALL_CHECK_TIME_SECONDS do not: operations do not run in cycles, and
                      waiting workers always log who is missing
    tensors           allgather accepts a 0-d tensor as one row; allreduce accepts bool, bfloat16 and small
                      integers
    factors           prescale_factor and postscale_factor can differ between ranks; each rank applies its own
    SyncBatchNorm     also runs on the CPU
    optimizer state   broadcast_optimizer_state leaves a state empty if it is empty on the root. It takes no
                      step to fill the state, so no parameter decays. Gradients are zeros afterwards, as in
                      Horovod.
    shutdown          ends the world; init can start a new one. The worker remains in the job until the script
                      ends.
    errors            ValueError where Horovod's Python code refuses a call; an error that is both ValueError
                      and HorovodInternalError where Horovod's core does
    elastic training  see `hubring.workers.horovod.elastic`
"""

from __future__ import annotations

from hubring.workers.horovod import elastic as elastic
from hubring.workers.horovod import functions as functions
from hubring.workers.horovod import optimizer as optimizer
from hubring.workers.horovod import sync_batch_norm as sync_batch_norm
from hubring.workers.horovod.basics import check_extension as check_extension
from hubring.workers.horovod.collectives import compression as compression
from hubring.workers.horovod.collectives import mpi_ops as mpi_ops
from hubring.workers.horovod.collectives.mpi_ops import *  # noqa: F403
from hubring.workers.horovod.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from hubring.workers.horovod.functions import *  # noqa: F403
from hubring.workers.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from hubring.workers.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

__version__ = "0.28.1"
