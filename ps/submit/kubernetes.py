"""Kubernetes: a JobSet, or a Kubeflow TrainJob with its runtime; tokens; a network policy; a volume claim.

A JobSet has one Job for the server and one for the workers, which start, end and restart together. The
workers reach the server by the host name that JobSet gives its pod. The workers are pods of an Indexed
Job. Their JOB_COMPLETION_INDEX is their rank, or their node's index if a pod runs several workers.

Exit codes decide how the job ends. The server's exit code is the job's. 75 means "stopped on request", 69
"lost a process", 128 and more "killed":

If a hub's worker exits with 69 or 75, or its pod is evicted, Kubernetes replaces the pod, and the worker
rejoins.

If the server is lost or evicted, or any worker is in an all-or-nothing job, the attempt ends, and JobSet
restarts the job from its checkpoint: at most --restarts times, or with --requeue any number of times.
JobSet cannot count losses and preemptions apart: it sees only that a pod failure rule failed a Job.

Other exit codes do not restart the job.
"""

from __future__ import annotations

from typing import Any

from hubring.ps.core.errors import Fenced, ServerUnreachable, UsageError
from hubring.ps.process.restarts import RESTARTABLE
from hubring.ps.submit import container, pods
from hubring.ps.submit.container import YamlDocument, dump_yaml
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


def server_host_name(job: Submission) -> str:
    """Returns the server's host name: JobSet, Job, the Job's index, the pod's index, and the service."""
    return f"{job.name}-server-0-0.{job.name}"


def jobset_spec(job: Submission, workers: str = "worker", worker_labels: Spec | None = None) -> Spec:
    """Returns the specification of a JobSet.

    Args:
        job: The job.
        workers: The name of the workers' Job and container.
        worker_labels: Labels of the workers' Job.
    """
    pod = pods.worker_pod(job, server_host_name(job), workers)
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
    return _job(job, pods.server_pod(job), 1, 0, [_fail("server", RESTARTED), _evicted("FailJob")])


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


CHECKPOINTS_SIZE = "20Gi"
_COMMENT = {
    "jobset": "Made by: ps-server submit --engine kubernetes. Needs JobSet 0.8 or later in the cluster.",
    "trainjob": "Made by: ps-server submit --engine kubernetes --kind trainjob. Needs Kubeflow Trainer 2.",
}


class Kubernetes:
    """Kubernetes. `kubectl` uses its current context and namespace."""

    command = ("kubectl", "apply", "-f", "-")
    fix = "install it, or apply the output of --dry-run on a machine that has it"

    def render(self, job: Submission) -> str:
        """Returns the manifests, in the order in which Kubernetes needs them, without the Secret."""
        of_kind = _trainjob if job.config.kind == "trainjob" else _jobset
        folders = [*job.workers_folders, *([job.servers_folder] if job.servers_folder else [])]
        documents = [*([_claim(job)] if folders else []), _network(job), *of_kind(job)]
        return dump_yaml([_COMMENT[job.config.kind], *pods.secret_instructions(job)], documents)

    def secrets(self, job: Submission) -> str:
        """Returns the Secret with the job's tokens, and a separator."""
        return dump_yaml([], [pods.new_secret(job, _metadata(job, pods.secret_name(job)))]) + "---\n"


def _jobset(job: Submission) -> list[YamlDocument]:
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job, job.name),
            "spec": jobset_spec(job),
        }
    ]


def _trainjob(job: Submission) -> list[YamlDocument]:
    """Returns a TrainingRuntime with this job's server, and the TrainJob. Its JobSet has the job's name.

    Kubeflow Trainer finds its nodes by the name `node` of the Job and container, and by the label below.
    The TrainJob sets their number.
    """
    nodes = job.nodes or job.workers
    trainer = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"spec": jobset_spec(job, "node", trainer)}
    group, version = "trainer.kubeflow.org", "trainer.kubeflow.org/v1alpha1"
    return [
        {
            "apiVersion": version,
            "kind": "TrainingRuntime",
            "metadata": _metadata(job, job.name),
            "spec": {"mlPolicy": {"numNodes": nodes}, "template": template},
        },
        {
            "apiVersion": version,
            "kind": "TrainJob",
            "metadata": _metadata(job, job.name),
            "spec": {
                "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": job.name},
                "trainer": {"numNodes": nodes},
            },
        },
    ]


def _claim(job: Submission) -> YamlDocument:
    """Returns a volume claim for checkpoints. It outlives the job: a job applied again resumes from it."""
    # Workers' pods run on several nodes, the server's pod on one.
    mode = "ReadWriteMany" if job.workers_folders else "ReadWriteOnce"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(job, f"{job.name}-{pods.CHECKPOINTS}"),
        "spec": {
            "accessModes": [mode],
            "resources": {"requests": {"storage": CHECKPOINTS_SIZE}},
        },
    }


def _network(job: Submission) -> YamlDocument:
    """Returns a policy that lets only the job's pods reach its pods, if the cluster enforces such policies.

    The page's port is open to the whole cluster: Prometheus reads /metrics, and the page needs a token.
    """
    chosen = {"podSelector": {"matchLabels": pods.job_labels(job)}}
    page = container.page_port(job)
    open_ = [] if page is None else [{"ports": [{"protocol": "TCP", "port": page}]}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, job.name),
        "spec": {**chosen, "policyTypes": ["Ingress"], "ingress": [{"from": [chosen]}, *open_]},
    }


def _metadata(job: Submission, name: str) -> YamlDocument:
    return {"name": name, "labels": pods.job_labels(job)}
