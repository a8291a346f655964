"""Kubernetes: a JobSet, or a Kubeflow TrainJob with its runtime; tokens; a network policy; a volume claim."""

from __future__ import annotations

from hubring.ps.submit import container, jobset, pods, secret
from hubring.ps.submit.documents import Document, dump
from hubring.ps.submit.job import Submission

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
        return dump([_COMMENT[job.config.kind], *secret.how_to(job)], documents)

    def secrets(self, job: Submission) -> str:
        """Returns the Secret with the job's tokens, and a separator."""
        return dump([], [secret.new(job, _metadata(job, secret.name(job)))]) + "---\n"


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
    """Returns a TrainingRuntime with this job's server, and the TrainJob. Its JobSet has the job's name.

    Kubeflow Trainer finds its nodes by the name `node` of the Job and container, and by the label below.
    The TrainJob sets their number.
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


def _network(job: Submission) -> Document:
    """Returns a policy that lets only the job's pods reach its pods, if the cluster enforces such policies.

    The page's port is open to the whole cluster: Prometheus reads /metrics, and the page needs a token.
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
