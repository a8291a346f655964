"""Gloo and NCCL: what the doctor says of them, and how it holds them to their sums."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.config.server import ServerConfig
from hubring.ps.doctor import collectives
from hubring.ps.doctor.finding import ok
from hubring.ps.doctor.subject import Subject
from tests.ps.doctor.case import Case, judgements, only
from tests.ps.doctor.fake_gpus import see_gpus

HERE_ALONE = Subject(ServerConfig(), None, None, {}, 20.0)

CASES = [
    Case(
        collectives.judge_nccl("2.27.5", 4, ""),
        "ok",
        "version 2.27.5 in torch's build: an allreduce over the 4 GPU(s)",
    ),
    Case(
        collectives.judge_nccl("2.27.5", 0, ""),
        "skipped",
        "NCCL needs GPUs (version 2.27.5 in torch's build)",
    ),
    Case(collectives.judge_nccl(None, 0, ""), "skipped", "not in torch's build either"),
    Case(
        collectives.judge_nccl(None, 2, ""),
        "warning",
        "a ring over the 2 GPU(s) copies through host memory",
        "ps-worker --backend gloo",
    ),
    Case(
        collectives.judge_nccl("2.27.5", 2, "unhandled system error"),
        "failure",
        "an allreduce over the 2 GPU(s) failed: unhandled system error",
        "NCCL_DEBUG=INFO",
    ),
    Case(collectives.judge_gloo("10.0.0.7", ""), "ok", "2 ranks on 10.0.0.7 connected and reduced correctly"),
    Case(
        collectives.judge_gloo("127.0.0.1", "Network is unreachable"),
        "failure",
        "an allreduce of 2 ranks on 127.0.0.1 failed: Network is unreachable",
        "ip link set lo up",
    ),
    Case(
        collectives.judge_gloo("10.0.0.7", "timed out"),
        "failure",
        "an allreduce of 2 ranks on 10.0.0.7 failed: timed out",
        "let this machine reach itself at 10.0.0.7 on any TCP port (iptables -L",
    ),
]


@judgements(CASES)
def test_what_is_found_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


def test_nccl_is_held_to_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))

    def add(parts: list[torch.Tensor]) -> None:
        total = torch.stack(parts).sum(0)
        for part in parts:
            part.copy_(total)

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", add)
    assert only(collectives.examine_nccl()) == ok(
        "NCCL", "version 2.27.5 in torch's build: an allreduce over the 2 GPU(s) of this machine is correct"
    )
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", lambda parts: parts[1].fill_(3))
    assert "the sum is wrong on cuda:0" in only(collectives.examine_nccl()).found


def test_gloo_is_held_to_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_add", lambda rank, *_: torch.tensor([3.0, 3.0 + rank]))
    assert "the sum is wrong on rank 1" in only(collectives.examine_gloo(HERE_ALONE)).found
