"""The commands `ps-worker` and `ps-run`."""
