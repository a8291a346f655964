"""One run: its programs, where they run, their processes and output; also on the tasks of a launcher."""
