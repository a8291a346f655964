"""Ranks and their training scripts."""
