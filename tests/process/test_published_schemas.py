"""The manifests of examples/ against the schemas that their projects have published, as far as PyPI has them.

Kubernetes' own (Job, Service, DaemonSet, pod templates) are in kubernetes-validate, the models of TrainJob and JobSet
in kubeflow-trainer-api, those of PyTorchJob in kubeflow-training. LeaderWorkerSet has none there: its pod template is
checked here, and the rest in tests/unit/cluster/test_examples.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packaged import SCHEMAS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SCHEMAS.exists(), reason="not installed (python -m tests.packaged)"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# The packages have requirements of their own, so they are used by another process. It prints what is wrong with each.
CHECK = '''
import copy, json, sys, warnings
warnings.simplefilter("ignore")
import yaml, kubernetes_validate

def plain(document):
    try:
        kubernetes_validate.validate(document, "1.34", strict=True)
        return ""
    except kubernetes_validate.ValidationError as error:
        return str(error)

def model(document, module, name):
    module = __import__(f"kubeflow_trainer_api.models.{module}", fromlist=[name])
    kind = getattr(module, name)
    read = kind.from_dict(copy.deepcopy(document)).to_dict()
    return missing(document, read)

def missing(given, read, where=""):
    """What a model has not kept: models ignore names that they do not know."""
    if isinstance(given, dict) and isinstance(read, dict):
        lost = [where + "." + key for key in given if key not in read]
        return " ".join(lost) or joined(missing(given[key], read[key], where + "." + key) for key in given)
    if isinstance(given, list) and isinstance(read, list):
        return joined(missing(*both, where + "[]") for both in zip(given, read))
    return ""

def joined(parts):
    return " ".join(filter(None, parts))

def old_model(value, name, where=""):
    """The same by the tables of kubeflow-training's models, whose package needs a cluster's client."""
    from kubeflow.training import models
    if name.startswith("dict("):
        inner = name[5:-1].split(", ")[1]
        return joined(old_model(one, inner, where + "." + key) for key, one in value.items())
    kind = getattr(models, name, None)
    if kind is None:
        return ""
    known = {kind.attribute_map[field]: inner for field, inner in kind.openapi_types.items()}
    lost = [where + "." + key for key in value if key not in known]
    inner = [(key, one) for key, one in value.items() if isinstance(one, dict) and key in known]
    return " ".join(lost) or joined(old_model(one, known[key], where + "." + key) for key, one in inner)

path, found = sys.argv[1], {}
for document in yaml.safe_load_all(open(path)):
    kind = document["kind"]
    if kind in ("Job", "Service", "DaemonSet"):
        found[kind] = plain(document)
    elif kind == "TrainJob":
        found[kind] = model(document, "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob")
    elif kind == "JobSet":
        found[kind] = model(document, "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet")
        job = document["spec"]["replicatedJobs"][0]["template"]
        found["Job"] = plain({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job["spec"]})
    elif kind == "PyTorchJob":
        found[kind] = old_model(document, "KubeflowOrgV1PyTorchJob")
    pods = []
    if kind == "LeaderWorkerSet":
        pods = [document["spec"]["leaderWorkerTemplate"]["workerTemplate"]]
    if kind == "PyTorchJob":
        pods = [one["template"] for one in document["spec"]["pytorchReplicaSpecs"].values()]
    for pod in pods:
        found["Pod"] = plain({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]})
print(json.dumps(found))
'''
KINDS = {
    "kubernetes/job.yaml": {"Job", "Service"},
    "kubernetes/jobset.yaml": {"JobSet", "Job"},
    "kubernetes/trainjob.yaml": {"TrainJob"},
    "kubernetes/leaderworkerset.yaml": {"Pod"},
    "kubernetes/pytorchjob.yaml": {"PyTorchJob", "Pod"},
    "health/kubernetes_probe.yaml": {"DaemonSet"},
}


def checked(path: Path) -> Any:
    environ = {**os.environ, "PYTHONPATH": str(SCHEMAS)}
    done = subprocess.run([sys.executable, "-c", CHECK, path], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_is_what_its_schema_says(name: str) -> None:
    assert checked(EXAMPLES / name) == dict.fromkeys(KINDS[name], "")


@pytest.mark.parametrize(
    ("name", "old", "new", "kind"),
    [
        ("kubernetes/job.yaml", "completionMode", "completionsMode", "Job"),
        ("kubernetes/jobset.yaml", "enableDNSHostnames", "enableDNSHostname", "JobSet"),
        ("kubernetes/trainjob.yaml", "numNodes", "nodes", "TrainJob"),
        ("kubernetes/pytorchjob.yaml", "pytorchReplicaSpecs:", "specs: {}\n  pytorchReplicaSpecs:", "PyTorchJob"),
        ("kubernetes/leaderworkerset.yaml", "GracePeriodSeconds: 60", "GracePeriodSeconds: long", "Pod"),
        ("health/kubernetes_probe.yaml", "runtimeClassName", "runtimeClass", "DaemonSet"),
    ],
)
def test_a_slip_in_a_manifest_is_found(tmp_path: Path, name: str, old: str, new: str, kind: str) -> None:
    """That is, the schemas are really used."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "manifest.yaml"
    path.write_text(text.replace(old, new))
    assert checked(path)[kind]
