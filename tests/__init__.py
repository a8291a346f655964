"""The tests. Programs under test that are Pythons of their own find `tests.support` by PYTHONPATH."""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parent.parent)
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, _PATHS)])
