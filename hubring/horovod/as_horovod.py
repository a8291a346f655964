"""Lets `import horovod` import Hubring, in this process only: `import hubring.horovod.as_horovod`.

Import this module before Horovod's name is used. Then `horovod`, `horovod.torch` and Horovod's other modules
are those of `hubring.workers.horovod`, also where Horovod is installed.

Raises:
    ImportError: Horovod itself was imported before, so that the script would use both.
"""

import sys

from hubring.workers.horovod import alias

if "horovod" in sys.modules and not isinstance(sys.modules["horovod"].__loader__, alias.HorovodFinder):
    raise ImportError(
        f"horovod was imported from {sys.modules['horovod'].__file__} before;"
        " import hubring.horovod.as_horovod first"
    )
alias.install()
