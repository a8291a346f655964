"""What `ps-server submit` prints meets its readers' schemas, which is all that is known of Kubernetes."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from hubring.ps.submit import containers
from tests.support.submissions import IMAGE, documents, job

Manifest = dict[str, Any]

FLAGS: dict[str, dict[str, Any]] = {
    "hub": {},
    "all": {
        "requeue": True,
        "nodes": 2,
        "gpus": 2,
        "time": "1:00:00",
        "checkpoint_dir": Path("/kept"),
        "colocate": True,
    },
    "ring": {"topology": "ring", "requeue": True, "checkpoint_dir": Path("/kept")},
}


def check(manifest: Manifest) -> None:
    """Raises unless the schema of its kind takes it, and knows every field."""
    kind = manifest["kind"]
    if kind == "JobSet":
        modelled("JobsetV1alpha2JobSetSpec", manifest["spec"])
    elif kind in ("TrainJob", "TrainingRuntime"):
        modelled(f"TrainerV1alpha1{kind}", manifest)
    else:
        kubernetes_validate.validate(manifest, "1.33", strict=True)
    for each in jobs_of(manifest):
        kubernetes_validate.validate(each, "1.33", strict=True)


def modelled(name: str, part: Manifest) -> None:
    """A model leaves out what it does not know, so nothing may be missing from what comes back."""
    from kubeflow_trainer_api import models  # some hundred files

    kind = getattr(models, name)
    assert kind.from_dict(copy.deepcopy(part)).to_dict() == part


def jobs_of(manifest: Manifest) -> list[Manifest]:
    """The Jobs that JobSet's controller would make of it."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "one"},
            "spec": job["template"]["spec"],
        }
        for job in spec.get("replicatedJobs", [])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_kubernetes_would_take_the_manifests(kind: str, flags: dict[str, Any]) -> None:
    found = documents("kubernetes", "train.py", kind=kind, **flags)
    found.append(containers.new_secret(job(engine="kubernetes", image=IMAGE, workers=2)))
    assert {"NetworkPolicy", "JobSet" if kind == "jobset" else "TrainJob"} <= {one["kind"] for one in found}
    for manifest in found:
        check(manifest)
    spoilt = next(one for one in found if one["kind"] in ("JobSet", "TrainJob"))
    spoilt["spec"]["nam"] = "train"
    with pytest.raises((AssertionError, ValueError)):
        check(spoilt)


def compose_schema() -> Manifest:
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema: Manifest = json.loads(folder.read_text())
    return schema


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [{}, {"workers": None, "gpus": 2}, {"colocate": True, "checkpoint_dir": Path("/kept")}]
)
def test_compose_would_take_the_file(flags: dict[str, Any]) -> None:
    (file,) = documents("compose", "train.py", **flags)
    jsonschema.validate(file, compose_schema())
    file["services"]["worker"]["replicas"] = 4
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(file, compose_schema())
