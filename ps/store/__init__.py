"""A shard's state: rounds, ledger, consistency, collectives. No I/O."""
