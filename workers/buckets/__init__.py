"""Flat buckets of gradients and parameters, on the CPU or a GPU."""
