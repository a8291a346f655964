"""Ranks, and what they train."""
