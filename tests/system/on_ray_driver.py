"""A driver of Ray's, with a cluster of its own: trains, and prints what came back.

    on_ray_driver.py WORKERS [FLAG OF ps-worker]... -- SCRIPT [ARGS]...
"""

from __future__ import annotations

import json
import sys
from tempfile import TemporaryDirectory
from typing import Any

import ray

from workers import on_ray


def main() -> None:
    workers, *flags = sys.argv[1:]
    cut = flags.index("--")
    own: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "num_cpus": int(workers) + 1}
    with TemporaryDirectory(prefix="hubring-ray-", ignore_cleanup_errors=True) as place:
        ray.init(_temp_dir=place, log_to_driver=True, logging_level="error", **own)
        try:
            results = on_ray.train(flags[cut + 1 :], workers=int(workers), worker=flags[:cut])
        finally:
            ray.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
