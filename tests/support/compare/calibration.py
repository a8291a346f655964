"""Invented constants for the cost model, and a job and a setting to predict."""

from __future__ import annotations

from hubring.workers.compare.cost.model.constants import Constants, Wire
from hubring.workers.compare.cost.prediction import Job
from hubring.workers.compare.experiment.setting import Link, Setting

WIRE = Wire(alpha=1e-4, beta=1e-9, cpu=0.5e-9)
CONSTANTS = Constants(
    wires=dict.fromkeys(("shm", "zmq", "grpc", "gloo"), WIRE),
    copy=1e-10,
    reduce=1e-10,
    apply={"sgd": 2e-10, "adam": 4e-10},
    serve=5e-5,
    cores=2,
    spread={"copy": (0.9e-10, 1.2e-10)},
    machine={"cores": 2},
    date="2026-11-21T12:00:00+00:00",
)
JOB = Job(model_bytes=40 << 20, compute=0.1, batch=32)
LINKED = Setting(workers=4, servers=1, link=Link(rate=1e9))
