"""The coordinator: membership, plans, checkpoints and the end of a job."""
