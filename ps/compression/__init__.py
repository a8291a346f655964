"""Codecs for gradients, and error feedback. Pure rules, no I/O."""
