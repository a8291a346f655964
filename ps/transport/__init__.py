"""Wires: they move opaque messages and know nothing of gradients."""
