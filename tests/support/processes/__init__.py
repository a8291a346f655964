"""Programs under test, and checks for leftover processes and memory."""
