"""A shard's state: rounds, exactly once, consistency, collectives. No I/O."""
