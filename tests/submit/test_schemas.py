"""The files for Kubernetes and SkyPilot against their own schemas, where those are here.

TRAINER_CRDS names a directory with the CustomResourceDefinitions of Kubeflow Trainer v2
(manifests/base/crds of its repository). SKYPILOT_PYTHON names an interpreter that has skypilot,
which takes 460 MB: an environment of its own.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import samecurve, write_config

CRDS, SKYPILOT = os.environ.get("TRAINER_CRDS", ""), os.environ.get("SKYPILOT_PYTHON", "")
JOB = ("--nodes", "2", "--gpus-per-node", "8", "--gpu-type", "H100", "--volume", "runs:/runs")
CHECK_TASK = """
import json, sys
import jsonschema, yaml
from sky import Task
from sky.utils import schemas

Task.from_yaml(sys.argv[1])
content = yaml.safe_load(open(sys.argv[1]))
jsonschema.validate(content.pop("resources"), schemas.get_resources_schema())
jsonschema.validate(content, schemas.get_task_schema())
print("valid")
"""


@pytest.mark.skipif(not CRDS, reason="TRAINER_CRDS names no directory with Trainer's schemas")
def test_kubernetes_takes_the_documents(tmp_path: Path, corpus: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    config = write_config(tmp_path, corpus)
    words = ("--image", "images/samecurve:1", "--memory", "64Gi", "--no-plan", "--dry-run")
    samecurve("submit", "k8s", "-f", config.name, *JOB, *words, cwd=tmp_path)
    text = (tmp_path / "tiny.k8s.yaml").read_text()
    for document in yaml.safe_load_all(text):
        plural = f"{document['kind'].lower()}s"
        file = Path(CRDS) / f"trainer.kubeflow.org_{plural}.yaml"
        definition = yaml.safe_load(file.read_text())
        [version] = definition["spec"]["versions"]
        schema = _strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        jsonschema.validate(document, schema)
        document["spec"]["nodes"] = 2  # the check can fail
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document, schema)


def _strict(schema: Any) -> Any:
    """A schema that refuses unknown fields, as the server does, in JSON Schema's own words."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {key: _strict(part) for key, part in schema.items()}
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not keeps:
        strict["additionalProperties"] = False
    return strict


@pytest.mark.long
@pytest.mark.skipif(not SKYPILOT, reason="SKYPILOT_PYTHON names no interpreter with skypilot")
def test_skypilot_takes_the_yaml(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus)
    words = ("--infra", "k8s", "--no-plan", "--dry-run", "--setup", "pip install samecurve.whl")
    samecurve("submit", "skypilot", "-f", config.name, *JOB, *words, cwd=tmp_path)
    done = subprocess.run(
        [SKYPILOT, "-c", CHECK_TASK, "tiny.sky.yaml"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "valid" in done.stdout, json.dumps(done.stderr[-2000:])
