"""Gradients and parameters in flat buckets, on the CPU or a GPU."""
