"""What the bench shows: the table of a run, the ratios that are wanted, and the tables of RESULTS.md."""
