"""One run: its programs, their processes and their output."""
