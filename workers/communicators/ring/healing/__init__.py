"""A ring that goes on without lost members, and lets newcomers in."""
