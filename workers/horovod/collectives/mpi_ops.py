"""The names of `horovod.torch.mpi_ops`: the operations, the world, and the autograd functions."""

from hubring.workers.horovod.basics import HorovodBasics as HorovodBasics
from hubring.workers.horovod.basics import ccl_built as ccl_built
from hubring.workers.horovod.basics import check_installed_version as check_installed_version
from hubring.workers.horovod.basics import cross_rank as cross_rank
from hubring.workers.horovod.basics import cross_size as cross_size
from hubring.workers.horovod.basics import cuda_built as cuda_built
from hubring.workers.horovod.basics import ddl_built as ddl_built
from hubring.workers.horovod.basics import (
    get_average_backwards_compatibility_fun as get_average_backwards_compatibility_fun,
)
from hubring.workers.horovod.basics import gloo_built as gloo_built
from hubring.workers.horovod.basics import gloo_enabled as gloo_enabled
from hubring.workers.horovod.basics import gpu_available as gpu_available
from hubring.workers.horovod.basics import init as init
from hubring.workers.horovod.basics import is_homogeneous as is_homogeneous
from hubring.workers.horovod.basics import is_initialized as is_initialized
from hubring.workers.horovod.basics import local_rank as local_rank
from hubring.workers.horovod.basics import local_size as local_size
from hubring.workers.horovod.basics import mpi_built as mpi_built
from hubring.workers.horovod.basics import mpi_enabled as mpi_enabled
from hubring.workers.horovod.basics import mpi_threads_supported as mpi_threads_supported
from hubring.workers.horovod.basics import nccl_built as nccl_built
from hubring.workers.horovod.basics import num_rank_is_power_2 as num_rank_is_power_2
from hubring.workers.horovod.basics import rank as rank
from hubring.workers.horovod.basics import rocm_built as rocm_built
from hubring.workers.horovod.basics import shutdown as shutdown
from hubring.workers.horovod.basics import size as size
from hubring.workers.horovod.basics import start_timeline as start_timeline
from hubring.workers.horovod.basics import stop_timeline as stop_timeline
from hubring.workers.horovod.collectives.allreduce import HorovodAllreduce as HorovodAllreduce
from hubring.workers.horovod.collectives.allreduce import HorovodGroupedAllreduce as HorovodGroupedAllreduce
from hubring.workers.horovod.collectives.allreduce import allreduce as allreduce
from hubring.workers.horovod.collectives.allreduce import allreduce_ as allreduce_
from hubring.workers.horovod.collectives.allreduce import allreduce_async as allreduce_async
from hubring.workers.horovod.collectives.allreduce import allreduce_async_ as allreduce_async_
from hubring.workers.horovod.collectives.allreduce import grouped_allreduce as grouped_allreduce
from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_ as grouped_allreduce_
from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async as grouped_allreduce_async
from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async_ as grouped_allreduce_async_
from hubring.workers.horovod.collectives.compression import Compression as Compression
from hubring.workers.horovod.collectives.moving import HorovodAllgather as HorovodAllgather
from hubring.workers.horovod.collectives.moving import HorovodAlltoall as HorovodAlltoall
from hubring.workers.horovod.collectives.moving import HorovodBroadcast as HorovodBroadcast
from hubring.workers.horovod.collectives.moving import HorovodGroupedAllgather as HorovodGroupedAllgather
from hubring.workers.horovod.collectives.moving import allgather as allgather
from hubring.workers.horovod.collectives.moving import allgather_async as allgather_async
from hubring.workers.horovod.collectives.moving import alltoall as alltoall
from hubring.workers.horovod.collectives.moving import alltoall_async as alltoall_async
from hubring.workers.horovod.collectives.moving import broadcast as broadcast
from hubring.workers.horovod.collectives.moving import broadcast_ as broadcast_
from hubring.workers.horovod.collectives.moving import broadcast_async as broadcast_async
from hubring.workers.horovod.collectives.moving import broadcast_async_ as broadcast_async_
from hubring.workers.horovod.collectives.moving import grouped_allgather as grouped_allgather
from hubring.workers.horovod.collectives.moving import grouped_allgather_async as grouped_allgather_async
from hubring.workers.horovod.collectives.moving import sparse_allreduce_async as sparse_allreduce_async
from hubring.workers.horovod.collectives.operation import Adasum as Adasum
from hubring.workers.horovod.collectives.operation import Average as Average
from hubring.workers.horovod.collectives.operation import Max as Max
from hubring.workers.horovod.collectives.operation import Min as Min
from hubring.workers.horovod.collectives.operation import Product as Product
from hubring.workers.horovod.collectives.operation import Sum as Sum
from hubring.workers.horovod.collectives.operation import barrier as barrier
from hubring.workers.horovod.collectives.operation import join as join
from hubring.workers.horovod.collectives.operation import poll as poll
from hubring.workers.horovod.collectives.operation import synchronize as synchronize
from hubring.workers.horovod.collectives.reducescatter import (
    HorovodGroupedReducescatter as HorovodGroupedReducescatter,
)
from hubring.workers.horovod.collectives.reducescatter import HorovodReducescatter as HorovodReducescatter
from hubring.workers.horovod.collectives.reducescatter import grouped_reducescatter as grouped_reducescatter
from hubring.workers.horovod.collectives.reducescatter import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from hubring.workers.horovod.collectives.reducescatter import reducescatter as reducescatter
from hubring.workers.horovod.collectives.reducescatter import reducescatter_async as reducescatter_async
from hubring.workers.horovod.errors import HorovodInternalError as HorovodInternalError
from hubring.workers.horovod.world import ProcessSet as ProcessSet
from hubring.workers.horovod.world import add_process_set as add_process_set
from hubring.workers.horovod.world import global_process_set as global_process_set
from hubring.workers.horovod.world import remove_process_set as remove_process_set

_basics = HorovodBasics()
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
