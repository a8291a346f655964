"""Scripts that know nothing of Hubring: their end, comparisons of them, and faults in one of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.compare.anywhere import results
from tests.support.processes.cluster import TRAIN, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]

COMPARE = "hubring.workers.compare.cli"
PS_RUN = "hubring.workers.programs.ps_run"
PLAIN = Path(__file__).parents[1] / "support/compare/plain_ddp.py"

FEWER_STEPS = ("range(4)", 'range(4 if dist.get_backend() == "gloo" else 3)')
NO_MEANS = (
    "optimizer.zero_grad()",
    'optimizer.zero_grad(); model.require_backward_grad_sync = dist.get_backend() == "gloo" or epoch < 3',
)
AWKWARD = (
    (
        "optimizer = torch.optim.SGD(model",
        "import copy\nother = torch.optim.Adam(model.module[0].parameters())\n"
        "optimizer = torch.optim.SGD(model.module[2]",
    ),
    ("optimizer.step()", "optimizer.step(); other.step()"),
    ("optimizer.zero_grad()", "model.zero_grad()"),
    ("    if dist", "    copy.deepcopy(model)\n    print('the loss is next')\n    if dist"),
)
BY_HAND = (
    "optimizer.step()",
    "[one.data.sub_(one.grad, alpha=0.1) for one in model.parameters()]",
)

LATE_CALLBACK = """
import threading, time
import torch, torch.distributed as dist

def train():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    store, begun = dist.distributed_c10d._get_default_store(), threading.Event()
    if dist.get_rank() == 1:
        store.wait(["callback"])
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if dist.get_rank() == 0:  # a callback in Gloo's thread ends when the group and the model are gone
        work.get_future().then(lambda _: (begun.set(), time.sleep(1)))
        store.set("callback", "")
        begun.wait()
    dist.destroy_process_group()

train()
"""


def test_a_script_ends_whose_model_goes_while_gloos_threads_need_the_interpreter(
    cluster: Cluster, tmp_path: Path
) -> None:
    (script := tmp_path / "train.py").write_text(LATE_CALLBACK)
    program = cluster.run("run", PS_RUN, "-n", "2", str(script))
    assert program.wait() == 0, program.said()


def compared(
    cluster: Cluster, folder: Path, *changes: tuple[str, str], code: int = 0, more: Sequence[str] = ()
) -> Any:
    """Runs the script in both rows, with parts of it replaced; returns the results by row."""
    text = PLAIN.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    script = folder / "train.py"
    script.write_text(text)
    words = ["--script", str(script), "--arguments", "{seed}", "--rows", "ddp,ddp-hub", "--seeds", "1"]
    words += ["--metric-regex", r"loss (\S+)", "--out", str(folder / "out"), *more]
    cluster.run("compare", COMPARE, "run", *words).done(code)
    return results(folder / "out")


def withheld(found: Any) -> dict[str, str]:
    return {row["row"]: row["withheld"] or "" for row in found["rows"]}


def test_a_script_that_imports_only_torch_is_compared_and_checked(cluster: Cluster, tmp_path: Path) -> None:
    found = compared(cluster, tmp_path, more=["--samples-per-step", "24"])
    assert withheld(found) == {"ddp": "", "ddp-hub": ""}
    assert [(each["judged"], each["fault"], each["advice"]) for each in found["gate"]["steps"]] == [
        (40, "", "")
    ] * 3
    assert [(pair["first"], pair["second"], pair["passed"]) for pair in found["gate"]["pairs"]] == [
        ("ddp", "ddp-hub", True)
    ]
    first, second = (row["numbers"] for row in found["rows"])
    assert first["final_loss"]["median"] == pytest.approx(second["final_loss"]["median"], rel=1e-3)
    assert min(each["samples_per_second"]["median"] for each in (first, second)) > 0


@pytest.mark.full
def test_several_optimizers_copies_and_lines_without_a_number_are_no_fault(
    cluster: Cluster, tmp_path: Path
) -> None:
    assert withheld(compared(cluster, tmp_path, *AWKWARD)) == {"ddp": "", "ddp-hub": ""}


@pytest.mark.full
def test_a_row_of_it_that_takes_fewer_steps_shows_no_speed(cluster: Cluster, tmp_path: Path) -> None:
    found = compared(cluster, tmp_path, FEWER_STEPS, code=1)
    [failed] = [row["failed"] for row in found["rows"] if row["row"] == "ddp-hub"]
    assert "30 on rank 0 of ddp-hub, and 40 on rank 0 of ddp" in failed


@pytest.mark.full
def test_a_row_of_it_that_does_not_average_is_named(cluster: Cluster, tmp_path: Path) -> None:
    found = compared(cluster, tmp_path, NO_MEANS, code=1)
    assert "is not the mean of all ranks" in withheld(found)["ddp-hub"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (BY_HAND, "no optimizer of torch stepped the parameters of a DistributedDataParallel model"),
        pytest.param(
            ("DistributedDataParallel(nn", "nn.Sequential(nn"),
            "its SGD steps parameters that DistributedDataParallel does not exchange",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_script_of_which_nothing_is_seen_has_no_winner(
    cluster: Cluster, tmp_path: Path, change: tuple[str, str], why: str
) -> None:
    report = ("    if dist", "    import hubring; hubring.report(samples=12, loss=loss.item())\n    if dist")
    found = compared(cluster, tmp_path, change, report, code=1)
    assert set(withheld(found).values()) == {f"the gate could not check it: {why}"}
    assert found["answer"] == f"No row is called faster, because the gate could not check it: {why}."


def test_a_script_with_lines_of_hubring_is_refused_in_the_hubs_row(cluster: Cluster, tmp_path: Path) -> None:
    words = ["run", "--script", TRAIN, "--metric", "loss", "--rows", "ddp-hub", "--seeds", "0"]
    compare = cluster.run("compare", COMPARE, *words, "--out", str(tmp_path / "out"))
    assert "for hubring.DistributedOptimizer, use the row hub-aggregate" in compare.done(1)["error"]
