"""Clusters of nodes with several GPUs: their allreduces as nccl-tests measures them, and predictions."""
