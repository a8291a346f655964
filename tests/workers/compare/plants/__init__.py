"""Faults in what a comparison compares, planted one by one, and clean controls."""
