"""Peers: other libraries' gradient exchange, which `ps-worker bench` and `ps-compare` compare with Hubring.

    ddp    torch's DistributedDataParallel on a process group of Gloo or NCCL
    fsdp2  torch's fully_shard on such a group
    zero1  DistributedDataParallel and ZeroRedundancyOptimizer on such a group
    mpi    Open MPI's allreduce through mpi4py
    rpc    a parameter server on torch.distributed.rpc
    ray    a parameter server in a Ray actor

`rows` lists the peers. `process_group`, `mpi`, `rpc` and `ray` each implement one peer. `server` is the logic
of both parameter servers, and `serve` is their program.
"""
