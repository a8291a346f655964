"""Peers: other libraries' gradient exchange, which `ps-worker bench` and `ps-compare` compare with Hubring.

    ddp    torch's DistributedDataParallel on a process group of Gloo or NCCL
    fsdp2  torch's fully_shard on such a group
    zero1  DistributedDataParallel and ZeroRedundancyOptimizer on such a group
    mpi    Open MPI's allreduce through mpi4py
    rpc    a parameter server on torch.distributed.rpc
    ray    a parameter server in a Ray actor

`rows` lists the peers. `rendezvous` joins the groups of the first four, `rpc` and `ray` implement the
parameter servers, and `serve` is their program.
"""
