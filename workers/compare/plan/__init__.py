"""What to compare: settings, rows and experiments, read from a file and flags, and the order of runs."""
