"""`ps-compare`: one job on several topologies, first whether they agree, then how fast they are."""
