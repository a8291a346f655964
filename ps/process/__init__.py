"""Starts, watches and stops child processes."""
