"""A ring over NCCL: its process groups, and what makes it heal."""
