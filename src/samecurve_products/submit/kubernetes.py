"""A job as a TrainJob of Kubeflow Trainer v2, with the runtime that it needs.

The runtime says what a TrainJob can't: that exit code 2 ends the job, that any other failure starts
all machines again, and how long a machine has to save. Each machine starts its own ranks; the name
of the first is the one that JobSet gives its pod.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.seam import UserError
from samecurve_products.submit.engine import MADE_BY, Submission, yaml_text
from samecurve_products.submit.job import NEVER, PORT, Job
from samecurve_products.submit.volume import Volume

_INSTALL = "submit where kubectl reaches the cluster"
_API = "trainer.kubeflow.org/v1alpha1"
_NODE = "node"  # the name by which Trainer finds the job and the container of the machines
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What only Kubernetes' job has."""

    image: str
    volume: Volume | None
    namespace: str | None = None
    memory: str | None = None  # of a machine, as 64Gi
    cpus: str | None = None


def kubernetes_submission(job: Job, options: KubernetesOptions, path: Path | None) -> Submission:
    """The job as a YAML for kubectl. UserError: the machines would not share the run."""
    path = path or Path(f"{job.name}.k8s.yaml")
    if "://" not in str(job.run) and not (options.volume and options.volume.holds(job.run)):
        raise UserError(
            f"{job.run} lies in each pod's own file system, which goes with the pod",
            "--volume CLAIM:/PATH, a claim that all pods can write, and a --save-dir below /PATH",
            "--save-dir",
        )
    documents = [_runtime(job, options), _train_job(job, options)]
    text = yaml_text(documents)
    return Submission(
        path=path,
        text=f"# {MADE_BY} k8s: {job.name} on {job.nodes}\n{text}",
        argv=("kubectl", "create", "--filename", str(path)),
        install=_INSTALL,
    )


def _metadata(job: Job, options: KubernetesOptions) -> dict[str, str]:
    metadata = {"name": job.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    return metadata


def _train_job(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    command = job.command("python3")
    if job.nodes.count > 1:
        first = f"{job.name}-{_NODE}-0-0.{job.name}"
        command += ["--nnodes", str(job.nodes.count), "--rdzv", f"{first}:{PORT}"]
    limits: dict[str, Any] = {}
    if job.nodes.gpus:
        limits["nvidia.com/gpu"] = job.nodes.gpus
    if options.memory:
        limits["memory"] = options.memory
    if options.cpus:
        limits["cpu"] = options.cpus
    trainer: dict[str, Any] = {
        "numNodes": job.nodes.count,
        "image": options.image,
        "command": command,
        "env": [{"name": "SAMECURVE_LEAVE_SECONDS", "value": str(job.leave_seconds)}],
    }
    if limits:
        trainer["resourcesPerNode"] = {"limits": limits, "requests": limits}
    return {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": _metadata(job, options),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": job.name,
            },
            "trainer": trainer,
        },
    }


def _runtime(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    replicated = {
        "name": _NODE,
        "template": {
            "metadata": {"labels": _STEP},
            "spec": {
                "backoffLimit": 0,
                "podFailurePolicy": {"rules": _failure_rules()},
                "template": {"spec": _pod(job, options)},
            },
        },
    }
    return {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": {
            **_metadata(job, options),
            "labels": {"trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": job.nodes.count, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {
                        "maxRestarts": job.restarts,
                        "rules": [
                            {
                                "name": "never-again",
                                "action": "FailJobSet",
                                "onJobFailureReasons": ["PodFailurePolicy"],
                            }
                        ],
                    },
                    "replicatedJobs": [replicated],
                }
            },
        },
    }


def _failure_rules() -> list[dict[str, Any]]:
    """Exit code 2 ends the job; a pod that the cluster takes away does not count as failed."""
    return [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": _NODE, "operator": "In", "values": [NEVER]},
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _pod(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # NCCL and data workers share memory
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if options.volume:
        mounts.append({"name": "runs", "mountPath": options.volume.path})
        claim = {"claimName": options.volume.name}
        volumes.append({"name": "runs", "persistentVolumeClaim": claim})
    container = {
        "name": _NODE,
        "image": options.image,
        "workingDir": str(job.directory),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.save_seconds,
        "containers": [container],
        "volumes": volumes,
    }
