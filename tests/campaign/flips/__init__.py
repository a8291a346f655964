"""Single bits that flip on wires and in files."""
