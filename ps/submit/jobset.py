"""JobSet: the server's Job and the workers', which start, end and restart as one.

The workers find the server by the host name that JobSet gives its pod. They are
pods of an Indexed Job, whose JOB_COMPLETION_INDEX is their rank (or, with several
workers a pod, which node they are).

How it ends follows the exit codes. The server's verdict is the job's. 75 means
stopped on request. A worker of a hub that stops so, or whose pod is taken away, is
replaced and finds its place again; where all stand together, and for the server,
it ends the round, and a job that is to be requeued begins another from its
checkpoint, as often as that happens. Anything else is no reason to begin again.
"""

from __future__ import annotations

from typing import Any

from hubring.ps.core.errors import Fenced, UsageError
from hubring.ps.submit import pods
from hubring.ps.submit.job import Submission

PREEMPTED = Fenced.exit_code
HOPELESS = [UsageError.exit_code]
"""Exit codes of a worker that would end the same way again; not 78, which tells of a lease that runs, too."""
REPLACEMENTS = 3
"""How often workers of a hub that failed are replaced, all of them together."""

Spec = dict[str, Any]


def address(job: Submission) -> str:
    """The server's host name: JobSet, its Job, that Job's number, the pod's; and the JobSet's service."""
    return f"{job.name}-server-0-0.{job.name}"


def spec(job: Submission, workers: str = "worker", worker_labels: Spec | None = None) -> Spec:
    """The specification of a JobSet.

    Args:
        job: The job.
        workers: What the workers' Job and container are called.
        worker_labels: Labels of the workers' Job.
    """
    pod = pods.worker(job, address(job), workers)
    metadata = {"metadata": {"labels": worker_labels}} if worker_labels else {}
    found: Spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["server"]},
        "replicatedJobs": [
            {"name": "server", "replicas": 1, "template": {"spec": _servers(job)}},
            {
                "name": workers,
                "replicas": 1,
                "dependsOn": [{"name": "server", "status": "Ready"}],
                "template": {**metadata, "spec": _workers(job, workers, pod)},
            },
        ],
    }
    if job.config.requeue:
        found["failurePolicy"] = _restarts(job, workers)
    return found


def _servers(job: Submission) -> Spec:
    return _job(job, pods.server(job), 1, 0, [_fail("server", [PREEMPTED]), _evicted("FailJob")])


def _workers(job: Submission, name: str, pod: Spec) -> Spec:
    count = job.nodes or job.workers
    if job.stands_together:
        return _job(job, pod, count, 0, [_fail(name, [PREEMPTED]), _evicted("FailJob")])
    replaced = {"action": "Ignore", "onExitCodes": _codes(name, [PREEMPTED])}
    return _job(job, pod, count, REPLACEMENTS, [_fail(name, HOPELESS), replaced, _evicted("Ignore")])


def _job(job: Submission, pod: Spec, pods_: int, backoff: int, rules: list[Spec]) -> Spec:
    limit = {} if job.seconds is None else {"activeDeadlineSeconds": job.seconds}
    return {
        "completionMode": "Indexed",
        "completions": pods_,
        "parallelism": pods_,
        "backoffLimit": backoff,
        **limit,
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }


def _fail(name: str, codes: list[int]) -> Spec:
    return {"action": "FailJob", "onExitCodes": _codes(name, codes)}


def _codes(name: str, codes: list[int]) -> Spec:
    return {"containerName": name, "operator": "In", "values": codes}


def _evicted(action: str) -> Spec:
    """What becomes of a pod that the cluster takes away, and that had no time to say 75."""
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _restarts(job: Submission, workers: str) -> Spec:
    """Only what was made to fail for 75 begins again; a hub's workers fail so where nothing can help them."""
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": ["server", workers] if job.stands_together else ["server"],
    }
    return {"maxRestarts": 0, "restartStrategy": "BlockingRecreate", "rules": [preempted]}
