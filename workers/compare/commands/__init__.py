"""The commands of `ps-compare`, one a file."""
