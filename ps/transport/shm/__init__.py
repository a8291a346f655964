"""Messages in shared memory, between processes of one host."""
