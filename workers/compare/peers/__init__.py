"""`hubring.workers.peers` as rows of the comparison: each trains the script that our rows train.

A peer is a communicator that `hubring.init()` finds in the place of hub and ring, so it reads the
same samples, writes the same record and the same last line, and stands before the same gate:

    ddp        DistributedDataParallel, applied to the script's own model
    mpi        an allreduce after backward, and the script's own optimizer
    rpc, ray   a parameter server, stepped by torch's own optimizer
"""
