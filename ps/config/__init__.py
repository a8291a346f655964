"""Every setting of every program, and the only reader of the environment.

A setting comes from the strongest place that gives it:

    flags  >  PS_* in the environment  >  [server], [worker] or [submit] in a TOML file  >  defaults

`--checkpoint-dir`, `PS_CHECKPOINT_DIR` and `checkpoint_dir` name the same field.
A config that exists is consistent: contradictions are refused where it is made.
"""
