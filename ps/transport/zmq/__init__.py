"""The ZeroMQ transport."""
