"""From the outcomes of runs to findings.

`decision` compares numbers and decides which ratios chance cannot explain. `verdict` puts decisions into
words, with `reasons`. `results` calls them all, and the gate.
"""
