"""Kubernetes: a JobSet, or Kubeflow Trainer's TrainJob with its runtime, and what both need beside them."""

from __future__ import annotations

from hubring.ps.submit import container, jobset, pods
from hubring.ps.submit.documents import Document, dump
from hubring.ps.submit.job import Submission

CHECKPOINTS_SIZE = "20Gi"
_COMMENT = {
    "jobset": "Made by: ps-server submit --engine kubernetes; it takes JobSet 0.8 or later in the cluster.",
    "trainjob": "Made by: ps-server submit --engine kubernetes --kind trainjob; it takes Kubeflow Trainer 2.",
}


class Kubernetes:
    """Kubernetes, by `kubectl`, in its current context and namespace."""

    command = ("kubectl", "apply", "-f", "-")
    mend = "install it, or take to where it is what --dry-run prints"

    def render(self, job: Submission) -> str:
        """The manifests, in the order in which they are needed."""
        of_kind = _trainjob if job.config.kind == "trainjob" else _jobset
        folders = [*job.workers_folders, *([job.servers_folder] if job.servers_folder else [])]
        documents = [*([_claim(job)] if folders else []), _network(job), *of_kind(job)]
        return dump([_COMMENT[job.config.kind], *container.INSECURE], documents)


def _jobset(job: Submission) -> list[Document]:
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job, job.name),
            "spec": jobset.spec(job),
        }
    ]


def _trainjob(job: Submission) -> list[Document]:
    """A runtime for this job's server, and the TrainJob, whose JobSet bears its name.

    The trainer's nodes are the Job and container called `node`, with the label
    below; how many there are is the TrainJob's to say.
    """
    nodes = job.nodes or job.workers
    trainer = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"spec": jobset.spec(job, "node", trainer)}
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


def _claim(job: Submission) -> Document:
    """Room for checkpoints, which outlives the job: applied again, the job goes on from there."""
    # Pods of workers are on several nodes; the server is on one.
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


def _network(job: Submission) -> Document:
    """Only the job's own pods reach its pods, where the cluster's network heeds such policies.

    The page is open to the cluster: it holds what Prometheus reads, and its buttons want a token.
    """
    chosen = {"podSelector": {"matchLabels": pods.labels(job)}}
    page = container.page_port(job)
    open_ = [] if page is None else [{"ports": [{"protocol": "TCP", "port": page}]}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, job.name),
        "spec": {**chosen, "policyTypes": ["Ingress"], "ingress": [{"from": [chosen]}, *open_]},
    }


def _metadata(job: Submission, name: str) -> Document:
    return {"name": name, "labels": pods.labels(job)}
