"""JobSet: one Job for the server and one for the workers, which start, end and restart together.

The workers reach the server by the host name that JobSet gives its pod. The workers are pods of an Indexed
Job. Their JOB_COMPLETION_INDEX is their rank, or their node's index if a pod runs several workers.

Exit codes decide how the job ends. The server's exit code is the job's. 75 means "stopped on request",
69 "lost a process", 128 and more "killed":

* If a hub's worker exits with 69 or 75, or its pod is evicted, Kubernetes replaces the pod, and the worker
  rejoins.
* If the server is lost or evicted, or any worker is in an all-or-nothing job, the attempt ends, and JobSet
  restarts the job from its checkpoint: at most --restarts times, or with --requeue any number of times.
  JobSet cannot count losses and preemptions apart: it sees only that a pod failure rule failed a Job.

Other exit codes do not restart the job.
"""

from __future__ import annotations

from typing import Any

from hubring.ps.core.errors import Fenced, ServerUnreachable, UsageError
from hubring.ps.process.restarts import RESTARTABLE
from hubring.ps.submit import pods
from hubring.ps.submit.job import Submission

RESTARTED = sorted(RESTARTABLE)
HOPELESS = [UsageError.exit_code]
"""Exit codes after which a replacement of the worker would fail the same way.

78 is not among them: it can also mean that the lease of the worker's predecessor has not expired yet.
"""
REPLACED = [ServerUnreachable.exit_code, Fenced.exit_code]
"""Exit codes of a hub's worker whose replacements are not counted: it lost its server or its place."""
REPLACEMENTS = 3
"""How many failed workers of a hub are replaced in total."""

Spec = dict[str, Any]


def address(job: Submission) -> str:
    """Returns the server's host name: JobSet, Job, the Job's index, the pod's index, and the service."""
    return f"{job.name}-server-0-0.{job.name}"


def spec(job: Submission, workers: str = "worker", worker_labels: Spec | None = None) -> Spec:
    """Returns the specification of a JobSet.

    Args:
        job: The job.
        workers: The name of the workers' Job and container.
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
    if job.config.requeue or job.restarts:
        found["failurePolicy"] = _restarts(job, workers)
    return found


def _servers(job: Submission) -> Spec:
    return _job(job, pods.server(job), 1, 0, [_fail("server", RESTARTED), _evicted("FailJob")])


def _workers(job: Submission, name: str, pod: Spec) -> Spec:
    count = job.nodes or job.workers
    if job.all_or_nothing:
        return _job(job, pod, count, 0, [_fail(name, RESTARTED), _evicted("FailJob")])
    replaced = {
        "action": "Ignore",
        "onExitCodes": _codes(name, REPLACED),
    }
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
    """Returns the rule for a pod that the cluster evicts before it can exit with 75."""
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _restarts(job: Submission, workers: str) -> Spec:
    """Returns the policy that restarts a job only if a pod failure rule failed its Job because of a loss.

    The workers' Job of a hub is excluded: a pod failure rule fails it only for hopeless exit codes.
    """
    lost = {
        "name": "lost",
        "action": "RestartJobSetAndIgnoreMaxRestarts" if job.config.requeue else "RestartJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": ["server", workers] if job.all_or_nothing else ["server"],
    }
    rules = [lost, {"name": "failed", "action": "FailJobSet"}]
    return {"maxRestarts": job.restarts, "restartStrategy": "BlockingRecreate", "rules": rules}
