"""From the outcomes of runs to findings.

`measure` makes numbers of a run's records. `gate` judges which rows computed the same, so that their speeds
may be shown; `step_checks` judges each of their steps by itself. `decision` compares numbers and decides
which ratios chance cannot explain. `verdict` puts decisions into words, with `reasons`. `results` calls them
all.
"""
