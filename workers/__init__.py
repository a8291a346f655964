"""The worker side: programs, optimizer, communicators, comparison. Scripts use `import hubring`."""
