"""Conformance checks for transports, and an in-process transport."""
