"""Server and workers with the tokens of a Kubernetes Secret, mounted as a pod mounts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.ps.submit.containers import TOKENS_FILE, new_secret
from tests.support.processes.cluster import SMALL, Cluster, mounted
from tests.support.submissions import IMAGE, inside, job, jobs

pytestmark = pytest.mark.slow


def pod(name: str, entries: dict[str, str], folder: Path) -> list[str]:
    """What runs a command that sees what the pod's volume shows, with the mode that the kubelet gives it."""
    folder.mkdir()
    volumes = jobs("train.py")[name]["template"]["spec"]["volumes"]
    for item in next(one["secret"]["items"] for one in volumes if one["name"] == "tokens"):
        (folder / item["path"]).write_text(entries[item["key"]])
        (folder / item["path"]).chmod(0o440)
    place = next(one["mountPath"] for one in inside(jobs()[name])["volumeMounts"] if one["name"] == "tokens")
    return mounted(f"mount -t tmpfs none /run && mkdir -p {place} && mount --bind {folder} {place}")


@pytest.mark.parametrize(
    "flags", [pytest.param([], marks=pytest.mark.full), ["--colocate"]], ids=["hub", "colocated"]
)
def test_a_job_trains_and_is_probed_with_its_secret(
    cluster: Cluster, tmp_path: Path, flags: list[str]
) -> None:
    entries = new_secret(job(engine="kubernetes", image=IMAGE, workers=2))["stringData"]
    servers, workers = (pod(name, entries, tmp_path / name) for name in ("server", "worker"))
    command = ["--host", "0.0.0.0", "--workers", "2", "--once", "--token-file", TOKENS_FILE, *flags]
    server, address = cluster.server(*command, within=servers)
    probe = ["health", address, "--service", "ready", "--token-file", TOKENS_FILE]
    cluster.run("health", "hubring.ps.cli", *probe, within=servers).done()
    pair = cluster.ranks(address, 2, "--token-file", TOKENS_FILE, SMALL, "5", within=workers)
    assert [worker.done()["steps"] for worker in pair] == [5, 5]
    assert server.done()["finished"] == [0, 1]
    as_operator = ["checkpoint", address, "--token-file", TOKENS_FILE]
    refused = cluster.run("refused", "hubring.ps.cli", *as_operator, within=workers)
    assert refused.wait() == 78
    assert "this program needs one for operator" in refused.said()
