"""Training scripts for tests."""
