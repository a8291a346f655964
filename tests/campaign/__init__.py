"""Seeded faults in real jobs, with an oracle and the invariants I1 to I8. See README.md."""
