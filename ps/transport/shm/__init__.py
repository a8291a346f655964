"""The shared memory transport, for processes on the same host."""
