"""A script that only exchanges: so many MiB in one bucket, and reports the seconds of its steps.

exchange.py STEPS MEGABYTES
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch

import workers
from ps.messages import Collective
from ps.optim import hyper_of
from workers import context
from workers.bucketing import make_buckets


def main() -> None:
    steps, megabytes = (int(argument) for argument in sys.argv[1:])
    workers.init()
    communicator = context.current().communicator
    model = torch.nn.ParameterList([torch.zeros(megabytes << 18)])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hyper = hyper_of(sgd.param_groups[0], "SGD")
    (bucket,) = make_buckets(sgd, model.named_parameters(), communicator.allocate, megabytes << 20, "SGD")
    communicator.attach([bucket])
    bucket.gradients.fill_(workers.rank() + 1.0)
    seconds = []
    for _ in range(steps):
        communicator.collective(Collective.BARRIER, None, name="step").wait(communicator.timeout)
        began = time.perf_counter()
        communicator.push_pull(bucket, hyper).wait(communicator.timeout)
        seconds.append(time.perf_counter() - began)
    workers.report(seconds=median(seconds), first=bucket.values[0].item())


if __name__ == "__main__":
    main()
