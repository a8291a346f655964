"""Which rows did the same work, so that their speeds may be shown.

`same_parameters` judges what runs computed, `equal_work` whether they were complete and had equal conditions,
`same_samples` their data. `step_checks` judges each step by itself: it is repeated in one process, from the
record.
"""
