"""Requests and replies of every kind, with tensors of all sorts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hubring.ps.compression.compressor import by_name
from hubring.ps.core.messages import (
    Call,
    Code,
    Coded,
    Collective,
    CollectiveResult,
    Contribute,
    Init,
    Missing,
    Probe,
    Pull,
    Push,
    ReadState,
    ReduceOp,
    Refusal,
    Reply,
    Request,
    StateReply,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import DtypeAndShape, HyperTable, Sender
from hubring.ps.store.collective import layout_of

SENDER = Sender(3, 2**40)
FLAT = torch.arange(5.0)
ADAM = OptimizerState(
    {"step": torch.tensor([3.0, 0.0]), "exp_avg": FLAT.double(), "exp_avg_sq": FLAT}, (1, 70)
)


UNLIKE = HyperTable(({"lr": 0.1, "momentum": 0.9}, {"lr": 0.2, "momentum": 0.9}), (0, 1, 0))


def coded(name: str = "int8", dtype: torch.dtype = torch.float32) -> Coded:
    codec, tensor = by_name(name), torch.arange(600).to(dtype)
    payload = torch.empty(codec.nbytes(600), dtype=torch.uint8)
    codec.encode(tensor, payload)
    return Coded(name, payload, 600, dtype)


def contribution(
    collective: Collective, *tensors: Tensor, name: str = "loss", settled: int = 0, **said: Any
) -> Contribute:
    """A part whose call says what its tensors are."""
    layouts = tuple(map(layout_of, tensors))
    return Contribute(SENDER, 7, Call(collective, name, layouts=layouts, **said), tensors, settled)


REQUESTS: list[Request | Probe] = [
    Init(SENDER, 0, FLAT),
    Init(SENDER, 0, FLAT.bfloat16(), ADAM),
    Init(SENDER, 0, FLAT, OptimizerState()),
    Push(SENDER, 0, 0, FLAT),
    Push(SENDER, 1, 2, FLAT, {"lr": 0.1}, absent=(0, 3, 200)),
    Push(SENDER, 1, 2, FLAT, UNLIKE, absent=(1,)),
    Push(SENDER, 1, 2, FLAT, weight=0.0),
    Push(SENDER, 1, 2, FLAT, weight=2.5),
    Push(SENDER, 1, 2, FLAT, covers=(Sender(0, 2**190), Sender(2**31, 7))),
    WriteParameters(SENDER, 4, 2**40, 7, FLAT),
    WriteState(SENDER, 4, 2**40, 7, ADAM),
    WriteState(SENDER, 0, 0, 0, OptimizerState()),
    ReadState(SENDER, 9),
    Probe(SENDER, (3, 2**63)),
    Probe(SENDER, ()),
    Push(SENDER, 2**31, 2**40, FLAT, {"lr": 0.1, "momentum": 0.9}),
    *(Push(SENDER, 1, 2, coded(name)) for name in ("bf16", "fp16", "int8", "sign", "topk:0.05")),
    Push(SENDER, 1, 2, coded("int8", torch.bfloat16), {"lr": 0.1}),
    Pull(SENDER, 0),
    Contribute(SENDER, 7, Call(Collective.BARRIER, "barrier")),
    contribution(Collective.ALLREDUCE, torch.ones(2, 3), op=ReduceOp.MAX, name="größe"),
    contribution(Collective.ALLREDUCE, torch.tensor(2.5), ranks=(0, 3, 2**31), settled=6),
    Contribute(SENDER, 9, Call(Collective.BARRIER, "barrier"), settled=4, closed=(6, 8)),
    contribution(Collective.ALLGATHER, torch.empty(0, 4)),
    contribution(Collective.ALLTOALL, torch.ones(3), splits=(2, 0, 1)),
    contribution(Collective.SCATTER, torch.ones(3).bool(), torch.empty(0), FLAT.double(), root=3),
    Contribute(SENDER, 8, Call(Collective.BROADCAST, "w", root=2, layouts=(DtypeAndShape("int8", (4,)),))),
]

REPLIES: list[Reply] = [
    Values(0, FLAT, 0, 0),
    Values(9, FLAT, clock=4, version=17, staleness=3, drain=True),
    Values(9, coded("sign"), clock=4, version=17),
    Values(9, FLAT, clock=4, version=17, absent=(1, 200)),
    StateReply(9, 17, ADAM),
    StateReply(0, 0, OptimizerState()),
    CollectiveResult(),
    CollectiveResult((torch.tensor([[True], [False]]),)),
    CollectiveResult((torch.tensor([True]), torch.tensor(1.5), FLAT)),
    Missing(()),
    Missing((0, 2**63)),
    Refusal(Code.FENCED, "rank 3 lost its place"),
]
