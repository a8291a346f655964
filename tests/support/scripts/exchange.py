"""A script that only exchanges one bucket, and reports each step's seconds and bytes.

exchange.py STEPS BYTES
"""

from __future__ import annotations

import json
import sys
import time

import torch

import workers
from ps.hyper import hyper_of
from ps.messages import Call, Collective
from workers import context
from workers.bucketing import make_buckets

WARM_UP = 2


def main() -> None:
    steps, nbytes = (int(argument) for argument in sys.argv[1:])
    workers.init()
    communicator = context.current().communicator
    traffic = communicator.traffic
    model = torch.nn.ParameterList([torch.zeros(nbytes // 4)])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hyper = hyper_of(sgd.param_groups[0], "SGD")
    (bucket,) = make_buckets(sgd, model.named_parameters(), communicator.allocate, nbytes, "SGD")
    communicator.attach([bucket])
    bucket.gradients.fill_(workers.rank() + 1.0)
    seconds, sent, received = [], traffic.bytes_sent, traffic.bytes_received
    for _ in range(WARM_UP + steps):
        communicator.collective(Call(Collective.BARRIER, "step")).wait()
        began = time.perf_counter()
        communicator.push_pull(bucket, hyper).wait(communicator.timeout)
        seconds.append(time.perf_counter() - began)
    workers.report(
        seconds=json.dumps(seconds[WARM_UP:]),
        sent=(traffic.bytes_sent - sent) // len(seconds),
        received=(traffic.bytes_received - received) // len(seconds),
    )


if __name__ == "__main__":
    main()
