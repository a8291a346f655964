"""The recovery of a coordinator: its state in a file, and the process that takes over if it is killed."""
