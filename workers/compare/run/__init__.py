"""One run: its programs, where they run, their processes and their output."""
