"""Other people's ways to exchange gradients, which `ps-worker bench` and `ps-compare` hold against ours.

    ddp   torch's DistributedDataParallel on a process group of Gloo or NCCL
    mpi   Open MPI's allreduce by mpi4py
    rpc   a parameter server on torch.distributed.rpc
    ray   a parameter server that is an actor of Ray's

`rows` lists them. Each other file is one peer's exchange and how its processes meet;
`server` is what both parameter servers do, and `serve` is their program.
"""
