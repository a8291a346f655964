"""The commands of `ps-compare`, one per file."""
