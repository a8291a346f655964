"""A script that only exchanges one bucket, and reports the seconds and bytes of each step.

exchange.py STEPS BYTES
"""

from __future__ import annotations

import json
import sys
import time

import torch

import hubring
from hubring.ps.core.messages import Call, Collective
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.runtime import context

WARM_UP = 2


def main() -> None:
    steps, nbytes = (int(argument) for argument in sys.argv[1:])
    hubring.init()
    communicator = context.current().communicator
    traffic = communicator.traffic
    model = torch.nn.ParameterList([torch.zeros(nbytes // 4)])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hyper = hyper_of(sgd.param_groups[0], "SGD")
    (bucket,) = make_buckets(sgd, model.named_parameters(), communicator.allocate, nbytes, "SGD")
    communicator.attach([bucket])
    bucket.gradients.fill_(hubring.rank() + 1.0)
    communicator.collective(Call(Collective.BARRIER, "start")).wait()  # the workers have met
    seconds, sent, received = [], traffic.bytes_sent, traffic.bytes_received
    for _ in range(WARM_UP + steps):
        communicator.collective(Call(Collective.BARRIER, "step")).wait()
        began = time.perf_counter()
        communicator.push_pull(bucket, hyper).wait(communicator.timeout)
        seconds.append(time.perf_counter() - began)
    hubring.report(
        seconds=json.dumps(seconds[WARM_UP:]),
        sent=(traffic.bytes_sent - sent) // len(seconds),
        received=(traffic.bytes_received - received) // len(seconds),
    )


if __name__ == "__main__":
    main()
