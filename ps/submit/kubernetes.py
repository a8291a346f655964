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

The pods meet the Pod Security Standard `restricted`: no root user, no capabilities, a read-only root file
system, no token for the cluster's API.

The server mounts all of the Secret, the workers only their token. A dry run prints no Secret, so that its
output can be kept and shared. `secret_instructions` explains how to make one by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hubring.ps.core.errors import Fenced, ServerUnreachable, UsageError
from hubring.ps.process.restarts import RESTARTABLE
from hubring.ps.security import token_file as files
from hubring.ps.security.guard import Role
from hubring.ps.security.keyring import make_files
from hubring.ps.submit import container
from hubring.ps.submit.container import dump_yaml
from hubring.ps.submit.job import GRACE_SECONDS, PORT, Submission

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


def jobset_spec(job: Submission, workers: str = "worker", worker_labels: Spec | None = None) -> Spec:
    """Returns the specification of a JobSet.

    Args:
        job: The job.
        workers: The name of the workers' Job and container.
        worker_labels: Labels of the workers' Job.
    """
    # The server's host name: JobSet, Job, the Job's index, the pod's index, and the service.
    pod = worker_pod(job, f"{job.name}-server-0-0.{job.name}", workers)
    metadata = {"metadata": {"labels": worker_labels}} if worker_labels else {}
    server = _job(job, server_pod(job), 1, 0, [_fail("server", RESTARTED), _evicted("FailJob")])
    found: Spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["server"]},
        "replicatedJobs": [
            {"name": "server", "replicas": 1, "template": {"spec": server}},
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


def _workers(job: Submission, name: str, pod: Spec) -> Spec:
    count = job.nodes or job.workers
    if job.all_or_nothing:
        return _job(job, pod, count, 0, [_fail(name, RESTARTED), _evicted("FailJob")])
    rules = [_fail(name, HOPELESS), _fail(name, REPLACED, "Ignore"), _evicted("Ignore")]
    return _job(job, pod, count, REPLACEMENTS, rules)


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


def _fail(name: str, codes: list[int], action: str = "FailJob") -> Spec:
    """Returns the rule for a container that ended with one of these exit codes."""
    return {"action": action, "onExitCodes": {"containerName": name, "operator": "In", "values": codes}}


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


CHECKPOINTS, CHECKPOINTS_SIZE = "checkpoints", "20Gi"
_COMMENT = {
    "jobset": "Made by: ps-server submit --engine kubernetes. Needs JobSet 0.8 or later in the cluster.",
    "trainjob": "Made by: ps-server submit --engine kubernetes --kind trainjob. Needs Kubeflow Trainer 2.",
}


def render(job: Submission) -> str:
    """Returns the manifests, in the order in which Kubernetes needs them, without the Secret."""
    of_kind = _trainjob if job.config.kind == "trainjob" else _jobset
    claim = [_claim(job)] if job.workers_folders or job.servers_folders else []
    documents = [*claim, _network(job), *of_kind(job)]
    return dump_yaml([_COMMENT[job.config.kind], *secret_instructions(job)], documents)


def secrets(job: Submission) -> str:
    """Returns the Secret with the job's tokens, and a separator."""
    return dump_yaml([], [new_secret(job)]) + "---\n"


def _jobset(job: Submission) -> list[Spec]:
    return [_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=jobset_spec(job))]


def _trainjob(job: Submission) -> list[Spec]:
    """Returns a TrainingRuntime with this job's server, and the TrainJob. Its JobSet has the job's name.

    Kubeflow Trainer finds its nodes by the name `node` of the Job and container, and by the label below.
    The TrainJob sets their number.
    """
    nodes = job.nodes or job.workers
    trainer = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"spec": jobset_spec(job, "node", trainer)}
    group, version = "trainer.kubeflow.org", "trainer.kubeflow.org/v1alpha1"
    runtime = {"mlPolicy": {"numNodes": nodes}, "template": template}
    place = {"apiGroup": group, "kind": "TrainingRuntime", "name": job.name}
    return [
        _object(job, version, "TrainingRuntime", spec=runtime),
        _object(job, version, "TrainJob", spec={"runtimeRef": place, "trainer": {"numNodes": nodes}}),
    ]


def _claim(job: Submission) -> Spec:
    """Returns a volume claim for checkpoints. It outlives the job: a job applied again resumes from it."""
    # Workers' pods run on several nodes, the server's pod on one.
    mode = "ReadWriteMany" if job.workers_folders else "ReadWriteOnce"
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": CHECKPOINTS_SIZE}}}
    return _object(job, "v1", "PersistentVolumeClaim", f"{job.name}-{CHECKPOINTS}", spec=spec)


def _network(job: Submission) -> Spec:
    """Returns a policy that lets only the job's pods reach its pods, if the cluster enforces such policies.

    The page's port is open to the whole cluster: Prometheus reads /metrics, and the page needs a token.
    """
    chosen = {"podSelector": {"matchLabels": job_labels(job)}}
    page = job.server.status_port
    open_ = [] if not page else [{"ports": [{"protocol": "TCP", "port": page}]}]
    spec = {**chosen, "policyTypes": ["Ingress"], "ingress": [{"from": [chosen]}, *open_]}
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def _object(job: Submission, version: str, kind: str, name: str = "", **content: object) -> Spec:
    """Returns an object of the job, with the job's name unless it has its own."""
    metadata = {"name": name or job.name, "labels": job_labels(job)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


TOKENS_ENTRY, KEY_ENTRY, WORKER_ENTRY = "tokens", "tokens.key", "worker"
"""Entries of the Secret: all tokens, the certificate with its private key, and the workers' token."""
MOUNT_FOLDER = "/run/secrets/hubring"
TOKENS_FILE = f"{MOUNT_FOLDER}/{TOKENS_ENTRY}"


def secret_name(job: Submission) -> str:
    """Returns the Secret's name."""
    return f"{job.name}-{TOKENS_ENTRY}"


def secret_instructions(job: Submission) -> tuple[str, ...]:
    """Returns comment lines that explain how to make the Secret by hand."""
    return (
        f"Without `ps-server submit`, first make the job's tokens, the Secret {secret_name(job)}:",
        f"  ps-server token new {TOKENS_ENTRY}",
        f"  ps-server token show --token-file {TOKENS_ENTRY} --role {Role.WORKER} --output {WORKER_ENTRY}",
        f"  kubectl create secret generic {secret_name(job)} --from-file={TOKENS_ENTRY}"
        f" --from-file={KEY_ENTRY} --from-file={WORKER_ENTRY}",
        f"  rm {TOKENS_ENTRY} {KEY_ENTRY} {WORKER_ENTRY}",
    )


def new_secret(job: Submission) -> Spec:
    """Returns a Secret with new tokens. It cannot change, because a running job uses it."""
    with TemporaryDirectory(prefix="hubring-tokens-") as folder:
        file = make_files(Path(folder) / TOKENS_ENTRY)
        entries = {
            TOKENS_ENTRY: file.read_text(),
            KEY_ENTRY: file.with_name(KEY_ENTRY).read_text(),
            WORKER_ENTRY: f"{files.read_tokens(file)[Role.WORKER]}\n",
        }
    return _object(job, "v1", "Secret", secret_name(job), type="Opaque", immutable=True, stringData=entries)


def secret_volume(job: Submission, *entries: str) -> Spec:
    """Returns the volume of a pod that sees these entries of the Secret.

    Args:
        job: The job.
        *entries: Names of entries. The workers' token gets the name of the file with all tokens.
    """
    items = [{"key": entry, "path": TOKENS_ENTRY if entry == WORKER_ENTRY else entry} for entry in entries]
    # The kubelet adds the right to read for the pod's group.
    return {
        "name": TOKENS_ENTRY,
        "secret": {"secretName": secret_name(job), "defaultMode": 0o400, "items": items},
    }


def job_labels(job: Submission) -> dict[str, str]:
    """Returns the labels that identify this job's objects."""
    return {"app.kubernetes.io/name": "hubring", "app.kubernetes.io/instance": job.name}


def server_pod(job: Submission) -> Spec:
    """Returns the server's pod: ready when workers can join, killed when it no longer answers."""
    page = job.server.status_port
    ports = [{"name": "control", "containerPort": PORT, "protocol": "TCP"}]
    ports += [] if not page else [{"name": "page", "containerPort": page, "protocol": "TCP"}]
    inside = {
        "name": "server",
        "image": job.config.image,
        "command": _unexpanded(container.server_command(job)),
        "ports": ports,
        # A pod that has started is ready, so that one probe runs on. Kubernetes' gRPC probes cannot use TLS.
        "startupProbe": {**_probe("--service", "ready"), "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**_probe(), "periodSeconds": 20, "failureThreshold": 3},
    }
    tokens = secret_volume(job, TOKENS_ENTRY, KEY_ENTRY)
    return _pod(job, inside, 1, tokens, job.servers_folders)


def worker_pod(job: Submission, server_name: str, name: str) -> Spec:
    """Returns a pod of workers. It needs no probe: the server detects lost workers by their leases.

    Args:
        job: The job.
        server_name: The server's host name.
        name: The container's name.
    """
    # If one pod is evicted, only its workers stop; the job continues, and they rejoin later.
    alone = job.per_node > 1 and not job.all_or_nothing and job.worker.on_preempt == "auto"
    more = ["--on-preempt", "leave"] if alone else []
    inside = {
        "name": name,
        "image": job.config.image,
        "command": _unexpanded(container.worker_command(job, server_name, more)),
    }
    tokens = secret_volume(job, WORKER_ENTRY)
    return _pod(job, inside, job.per_node, tokens, job.workers_folders, gpus=job.config.gpus)


def _probe(*words: str) -> Spec:
    command = ["ps-server", "health", f"127.0.0.1:{PORT}", *words]
    return {"exec": {"command": command}, "timeoutSeconds": 10}


def _pod(
    job: Submission, inside: Spec, processes: int, tokens: Spec, folders: Sequence[Path], gpus: int = 0
) -> Spec:
    gib = processes * container.memory(job)
    resources = {"cpu": str(processes * container.cpus(job)), "memory": f"{gib}Gi"}
    variables = container.variables(job, TOKENS_FILE)
    resources |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    mounts: list[Spec] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    mounts.append({"name": TOKENS_ENTRY, "mountPath": MOUNT_FOLDER, "readOnly": True})
    mounts += [{"name": CHECKPOINTS, "mountPath": container.absolute(path)} for path in folders]
    volumes: list[Spec] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib * 512}Mi"}},
        tokens,
    ]
    if folders:
        claim = {"claimName": f"{job.name}-{CHECKPOINTS}"}
        volumes.append({"name": CHECKPOINTS, "persistentVolumeClaim": claim})
    return {
        "metadata": {"labels": job_labels(job)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": container.USER,
                "runAsGroup": container.USER,
                "fsGroup": container.USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    **inside,
                    "env": [{"name": key, "value": text} for key, text in variables.items()],
                    "resources": {"limits": resources, "requests": dict(resources)},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }


def _unexpanded(words: Sequence[str]) -> list[str]:
    """Escapes `$` as `$$`, because Kubernetes replaces `$(NAME)` with a variable in a command."""
    return [word.replace("$", "$$") for word in words]
