"""A shard's state: rounds, ledger, consistency, collectives. Pure rules, no I/O."""
