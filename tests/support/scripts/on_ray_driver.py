"""A Ray driver with its own cluster: trains a script with a hub and a ring, and a script that does not exist.

on_ray_driver.py SCRIPT [ARGS]...
"""

from __future__ import annotations

import json
import sys
from tempfile import TemporaryDirectory
from typing import Any

import ray

from hubring.workers.programs import on_ray

WORKERS = 2


def main() -> None:
    script = sys.argv[1:]
    own: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
    with TemporaryDirectory(prefix="hubring-ray-", ignore_cleanup_errors=True) as place:
        ray.init(num_cpus=WORKERS, _temp_dir=place, logging_level="error", **own)
        try:
            results = {
                "hub": on_ray.train(script, workers=WORKERS),
                "ring": on_ray.train(script, workers=WORKERS, worker=["--topology", "ring"]),
                "nowhere": on_ray.train(["nowhere.py"], workers=WORKERS),
            }
        finally:
            ray.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
