"""The settings of all programs. Only this package reads the environment.

Sources, in order of precedence:

    flags  >  PS_* in the environment  >  [server], [worker] or [submit] in a TOML file  >  defaults

`--checkpoint-dir`, `PS_CHECKPOINT_DIR` and `checkpoint_dir` set the same field.
A config object is always consistent: its constructor raises if settings contradict each other.
"""
