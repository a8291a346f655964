"""Simulation of what formulas do not cover: stragglers, bounded staleness and queues."""
