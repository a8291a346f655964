"""Messages over ZeroMQ."""
