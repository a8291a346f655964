"""The output of the bench: the table of a run, the target ratios, and the tables of RESULTS.md."""
