"""What formulas do not tell: stragglers, bounded staleness and queues, simulated."""
