"""The API of `horovod.torch` on a hub or a ring: `import hubring.horovod as hvd`.

A script with `import horovod.torch as hvd` runs without edits under `ps-worker --as-horovod SCRIPT`
(`hubring.workers.horovod.alias`). The differences from Horovod 0.28.1:

    frameworks        only PyTorch
    MPI               not supported: mpi_built() and mpi_enabled() return False, mpi_threads_supported()
                      raises ValueError, and init(comm=) accepts only the list of all ranks
    launchers         ps-run and horovod.run start workers only on this machine
    Adasum            needs a power of 2 of ranks, like Horovod on the CPU
    process sets      you can add one at any time, without HOROVOD_DYNAMIC_PROCESS_SETS
    timeline          you can start it at any time; there are no cycles to mark
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
from hubring.workers.horovod.collectives.allgather import allgather as allgather
from hubring.workers.horovod.collectives.allgather import allgather_async as allgather_async
from hubring.workers.horovod.collectives.allgather import grouped_allgather as grouped_allgather
from hubring.workers.horovod.collectives.allgather import grouped_allgather_async as grouped_allgather_async
from hubring.workers.horovod.collectives.allreduce import allreduce as allreduce
from hubring.workers.horovod.collectives.allreduce import allreduce_ as allreduce_
from hubring.workers.horovod.collectives.allreduce import allreduce_async as allreduce_async
from hubring.workers.horovod.collectives.allreduce import allreduce_async_ as allreduce_async_
from hubring.workers.horovod.collectives.allreduce import grouped_allreduce as grouped_allreduce
from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_ as grouped_allreduce_
from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async as grouped_allreduce_async
from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async_ as grouped_allreduce_async_
from hubring.workers.horovod.collectives.alltoall import alltoall as alltoall
from hubring.workers.horovod.collectives.alltoall import alltoall_async as alltoall_async
from hubring.workers.horovod.collectives.barrier import barrier as barrier
from hubring.workers.horovod.collectives.barrier import join as join
from hubring.workers.horovod.collectives.broadcast import broadcast as broadcast
from hubring.workers.horovod.collectives.broadcast import broadcast_ as broadcast_
from hubring.workers.horovod.collectives.broadcast import broadcast_async as broadcast_async
from hubring.workers.horovod.collectives.broadcast import broadcast_async_ as broadcast_async_
from hubring.workers.horovod.collectives.objects import allgather_object as allgather_object
from hubring.workers.horovod.collectives.objects import broadcast_object as broadcast_object
from hubring.workers.horovod.collectives.reducescatter import grouped_reducescatter as grouped_reducescatter
from hubring.workers.horovod.collectives.reducescatter import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from hubring.workers.horovod.collectives.reducescatter import reducescatter as reducescatter
from hubring.workers.horovod.collectives.reducescatter import reducescatter_async as reducescatter_async
from hubring.workers.horovod.collectives.sparse import sparse_allreduce_async as sparse_allreduce_async
from hubring.workers.horovod.collectives.waiting import poll as poll
from hubring.workers.horovod.collectives.waiting import synchronize as synchronize
from hubring.workers.horovod.errors import HorovodInternalError as HorovodInternalError
from hubring.workers.horovod.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from hubring.workers.horovod.optimizer.compression import Compression as Compression
from hubring.workers.horovod.optimizer.distributed import DistributedOptimizer as DistributedOptimizer
from hubring.workers.horovod.optimizer.parameters import (
    broadcast_optimizer_state as broadcast_optimizer_state,
)
from hubring.workers.horovod.optimizer.parameters import broadcast_parameters as broadcast_parameters
from hubring.workers.horovod.optimizer.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from hubring.workers.horovod.reduce_ops import Adasum as Adasum
from hubring.workers.horovod.reduce_ops import Average as Average
from hubring.workers.horovod.reduce_ops import Max as Max
from hubring.workers.horovod.reduce_ops import Min as Min
from hubring.workers.horovod.reduce_ops import Product as Product
from hubring.workers.horovod.reduce_ops import Sum as Sum
from hubring.workers.horovod.world.capability import ccl_built as ccl_built
from hubring.workers.horovod.world.capability import cuda_built as cuda_built
from hubring.workers.horovod.world.capability import ddl_built as ddl_built
from hubring.workers.horovod.world.capability import gloo_built as gloo_built
from hubring.workers.horovod.world.capability import gloo_enabled as gloo_enabled
from hubring.workers.horovod.world.capability import mpi_built as mpi_built
from hubring.workers.horovod.world.capability import mpi_enabled as mpi_enabled
from hubring.workers.horovod.world.capability import mpi_threads_supported as mpi_threads_supported
from hubring.workers.horovod.world.capability import nccl_built as nccl_built
from hubring.workers.horovod.world.capability import rocm_built as rocm_built
from hubring.workers.horovod.world.lifecycle import init as init
from hubring.workers.horovod.world.lifecycle import is_initialized as is_initialized
from hubring.workers.horovod.world.lifecycle import shutdown as shutdown
from hubring.workers.horovod.world.lifecycle import start_timeline as start_timeline
from hubring.workers.horovod.world.lifecycle import stop_timeline as stop_timeline
from hubring.workers.horovod.world.process_set import ProcessSet as ProcessSet
from hubring.workers.horovod.world.process_set import add_process_set as add_process_set
from hubring.workers.horovod.world.process_set import global_process_set as global_process_set
from hubring.workers.horovod.world.process_set import remove_process_set as remove_process_set
from hubring.workers.horovod.world.ranks import cross_rank as cross_rank
from hubring.workers.horovod.world.ranks import cross_size as cross_size
from hubring.workers.horovod.world.ranks import is_homogeneous as is_homogeneous
from hubring.workers.horovod.world.ranks import local_rank as local_rank
from hubring.workers.horovod.world.ranks import local_size as local_size
from hubring.workers.horovod.world.ranks import rank as rank
from hubring.workers.horovod.world.ranks import size as size

__version__ = "0.28.1"
