"""`hubring.workers.peers` as rows of the comparison. Each trains the same script as Hubring's rows.

A peer is a communicator that replaces hub and ring in `hubring.init()`. So it reads the same samples, writes
the same record and last line, and is judged by the same gate:

    ddp        DistributedDataParallel, applied to the script's model
    fsdp2      `fully_shard`, applied to the script's model
    zero1      DistributedDataParallel and ZeroRedundancyOptimizer
    mpi        an allreduce after backward, and the script's optimizer
    rpc, ray   a parameter server that steps with torch's optimizer

A script that knows nothing of Hubring makes its own group, and trains as it is (`unedited.py`).
"""
