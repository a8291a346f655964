"""Gradient codecs and error feedback. No I/O."""
