"""Other people's ways to train, as rows of the comparison.

A peer runs the script that our rows run, under the names that `workers` has:

    ddp   torch's DistributedDataParallel, applied to the script's own model
    mpi   Open MPI's allreduce by mpi4py after backward, and the script's own optimizer
    rpc   a parameter server on torch.distributed.rpc, stepped by torch's own optimizer
    ray   the same as an actor of Ray's

So it reads the same samples, writes the same record and the same last line, and
stands before the same gate. `run` is a worker's program and `serve` a server's.
"""
