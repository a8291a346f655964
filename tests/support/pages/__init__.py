"""The status page and its clients."""
