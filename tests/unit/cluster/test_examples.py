"""The manifests and batch scripts of examples/: their form, and the place that saferun finds in what they start.

The form is a subset of the published schemas, stated here with its sources; the schemas themselves are used in
tests/process/test_published_schemas.py, where they can be had.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from saferun.cli.main import read_config
from saferun.cluster.placement import launcher
from saferun.cluster.schedulers import Surroundings
from saferun.config import LaunchConfig
from tests.unit.cluster.placing import HERE, place
from tests.unit.recorded_launchers import SLURM_TASK_A_HOST
from tests.unit.recorded_schedulers import HTCONDOR, LSF_BLAUNCH, flux

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def manifest(name: str, kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text(encoding="utf-8"))
    (found,) = [document for document in documents if document["kind"] == kind]
    assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", found["metadata"]["name"])
    return dict(found["spec"], apiVersion=found["apiVersion"])


def pod(template: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of the only container of a pod template."""
    (container,) = template["spec"]["containers"]
    assert (
        {"name", "image", "command"}
        <= set(container)
        <= {"name", "image", "command", "env", "resources", "volumeMounts"}
    )
    assert all(isinstance(word, str) for word in container["command"])
    return container["command"], {one["name"]: one["value"] for one in container.get("env", [])}


def started(command: Sequence[str], environ: Mapping[str, str]) -> LaunchConfig:
    """What the saferun of a command line makes of an environment."""
    at = next(i for i, word in enumerate(command) if word.rpartition("/")[2] == "saferun")
    return read_config(list(command[at + 1 :]), {"PATH": "/usr/bin", **environ})


@pytest.fixture
def hosts_file(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands in /etc/hosts of a pod, and what the pod is called."""
    seen = {"name": HERE, "text": ""}

    def this_host(environ: Mapping[str, str]) -> Surroundings:
        return Surroundings(environ, seen["name"], {"/etc/hosts": seen["text"]}.get)

    monkeypatch.setattr(launcher, "this_host", this_host)
    return seen


def test_an_indexed_job(hosts_file: dict[str, str]) -> None:
    """Source: batch/v1 JobSpec; its pods are ``<job>-<index>``, below the service that the subdomain names."""
    spec, service = manifest("job.yaml", "Job"), manifest("job.yaml", "Service")
    assert (spec["apiVersion"], service["apiVersion"]) == ("batch/v1", "v1")
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    template = spec["template"]
    assert template["spec"]["restartPolicy"] in {"Never", "OnFailure"}
    assert template["spec"]["subdomain"] == "train"
    assert (service["clusterIP"], service["selector"]) == ("None", {"job-name": "train"})
    for index in range(4):
        hosts_file.update(
            name=f"train-{index}", text=f"10.1.0.9\ttrain-{index}.train.ml.svc.cluster.local\ttrain-{index}\n"
        )
        command, environ = pod(template)
        config = started(command, {**KUBERNETES, **environ, "JOB_COMPLETION_INDEX": str(index)})
        assert (place(config), config.nproc_per_node) == ((4, 4, index), 8)
        assert config.rendezvous.master_addr == "train-0.train.ml.svc.cluster.local"
        assert int(environ["SAFERUN_SHUTDOWN_TIMEOUT"]) < template["spec"]["terminationGracePeriodSeconds"]


def test_an_indexed_job_says_what_its_backoff_limit_allows() -> None:
    """Source: batch/v1 JobSpec: it counts failed pods, and when one of them fails, saferun ends all."""
    spec = manifest("job.yaml", "Job")
    restarts, rest = divmod(spec["backoffLimit"], spec["completions"])
    text = (EXAMPLES / "kubernetes" / "job.yaml").read_text(encoding="utf-8")
    assert (restarts, rest) == (3, 0)
    assert f"{spec['backoffLimit']} are three restarts of {spec['completions']} pods" in text
    assert "The number of pods stands in four places" in text


def test_a_job_set(hosts_file: dict[str, str]) -> None:
    """Source: jobset.x-k8s.io/v1alpha2; its pods are ``<jobset>-<replicated job>-<job index>-<pod index>``."""
    spec = manifest("jobset.yaml", "JobSet")
    assert spec["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert spec["network"]["enableDNSHostnames"] is True
    (job,) = spec["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["completionMode"]) == (1, "Indexed")
    name = "train-workers-0-3"
    hosts_file.update(name=name, text=f"10.1.0.9\t{name}.train.ml.svc.cluster.local\t{name}\n")
    command, environ = pod(job["template"]["spec"]["template"])
    config = started(command, {**KUBERNETES, **environ, "JOB_COMPLETION_INDEX": "3"})
    assert place(config) == (job["template"]["spec"]["completions"],) * 2 + (3,)
    assert config.rendezvous.master_addr == "train-workers-0-0.train.ml.svc.cluster.local"


def test_a_train_job() -> None:
    """Source: trainer.kubeflow.org/v1alpha1; the runtime's plugin for torch sets PET_*."""
    spec = manifest("trainjob.yaml", "TrainJob")
    assert spec["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    trainer = spec["trainer"]
    pet = {"NNODES": str(trainer["numNodes"]), "NPROC_PER_NODE": "8", "NODE_RANK": "2"}
    pet |= {"MASTER_ADDR": "train-node-0-0.train", "MASTER_PORT": "29400"}
    config = started(trainer["command"], {**KUBERNETES, **{f"PET_{name}": value for name, value in pet.items()}})
    assert (place(config), config.nproc_per_node) == ((4, 4, 2), 8)
    assert (config.rendezvous.master_addr, config.rendezvous.ports) == ("train-node-0-0.train", (29400,))


def test_a_leader_worker_set() -> None:
    """Source: leaderworkerset.x-k8s.io/v1; a group's variables are those of the labels page of its documentation."""
    spec = manifest("leaderworkerset.yaml", "LeaderWorkerSet")
    assert spec["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(spec) <= {
        "apiVersion",
        "replicas",
        "startupPolicy",
        "leaderWorkerTemplate",
        "rolloutStrategy",
        "networkConfig",
    }
    group = spec["leaderWorkerTemplate"]
    assert set(group) <= {"size", "restartPolicy", "leaderTemplate", "workerTemplate", "subGroupPolicy"}
    assert group["restartPolicy"] in {"RecreateGroupOnPodRestart", "None"}
    command, environ = pod(group["workerTemplate"])
    variables = {
        "LWS_GROUP_SIZE": str(group["size"]),
        "LWS_WORKER_INDEX": "3",
        "LWS_LEADER_ADDRESS": "train-0.train.ml",
    }
    config = started(command, {**KUBERNETES, **environ, **variables})
    assert (place(config), config.rendezvous.master_addr) == ((4, 4, 3), "train-0.train.ml")


def test_a_pytorch_job() -> None:
    """Source: kubeflow.org/v1; its container is called ``pytorch``; the operator's variables as they were recorded."""
    spec = manifest("pytorchjob.yaml", "PyTorchJob")
    assert spec["apiVersion"] == "kubeflow.org/v1"
    replicas = spec["pytorchReplicaSpecs"]
    assert (set(replicas), replicas["Master"]["replicas"]) == ({"Master", "Worker"}, 1)
    count = sum(one["replicas"] for one in replicas.values())
    for one in replicas.values():
        assert one["template"]["spec"]["containers"][0]["name"] == "pytorch"
        command, environ = pod(one["template"])
        address = {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": str(count), "RANK": "2"}
        config = started(command, {**KUBERNETES, **environ, **address})
        assert (place(config), config.rendezvous.master_addr) == ((4, 4, 2), "train-master-0")


def test_a_probe_that_expects_gpus_sees_those_of_its_node() -> None:
    """A pod that does not has none, and its node would count as not fit; so would each node without GPUs."""
    (document,) = yaml.safe_load_all((EXAMPLES / "health" / "kubernetes_probe.yaml").read_text(encoding="utf-8"))
    spec = document["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert "--gpus" in container["readinessProbe"]["exec"]["command"]
    assert spec["runtimeClassName"] == "nvidia"
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container["env"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert [one["key"] for one in spec["tolerations"]] == ["nvidia.com/gpu"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"], "they belong to the trainings"


# --------------------------------------------------------------------------------------------------------------------
# Batch scripts

# The directives that each scheduler reads, by its manual: sbatch(1), qsub(1B), bsub(1), flux-batch(1).
DIRECTIVES = {
    "slurm.sh": (
        r"#SBATCH --(job-name|nodes|ntasks-per-node|gpus-per-node|cpus-per-task|time|signal)=\S+",
        SLURM_TASK_A_HOST,
    ),
    "pbs.sh": (r"#PBS -(N \S+|l (select|place|walltime)=\S+)", {}),
    "lsf.sh": (r"#BSUB -(J|n|R|gpu|W) \S+", {**LSF_BLAUNCH, "LSB_MCPU_HOSTS": f"{HERE} 1 node2 1"}),
    "flux.sh": (r"# flux: --(job-name=\S+|nodes=\d+|exclusive|time-limit=\w+)", {**flux(2, 0, size=4, hosts=4)}),
}


def sigkill_after_s(scheduler: str) -> int:
    """How long after its signal a scheduler kills, by docs/schedulers.md."""
    page = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^\| {scheduler} .*\| SIGKILL after .*\((\d+) s\) \|", page, re.MULTILINE | re.IGNORECASE)
    return int(found)


@pytest.mark.parametrize("name", DIRECTIVES)
def test_a_batch_script(name: str) -> None:
    """Its directives are known, bash can read it, and the command line of its saferun is one."""
    path = EXAMPLES / "schedulers" / name
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    text = path.read_text(encoding="utf-8")
    pattern, environ = DIRECTIVES[name]
    marked = [
        line for line in text.splitlines() if line.startswith(pattern.partition(" ")[0] + " ") and " -" in line[:12]
    ]
    assert marked
    assert all(re.fullmatch(pattern, line) for line in marked), marked
    if name == "pbs.sh":
        Path("hosts.8817").write_text(f"{HERE}\nnode2\n")
        environ = {"PBS_JOBID": "8817"}
    (line,) = [line for line in text.splitlines() if " --nproc-per-node" in line and not line.startswith("#")]
    # pbsdsh's has the path of this host.
    line = line.replace("exec '$(command -v saferun)'", "saferun").replace("exec saferun", "saferun")
    words = shlex.split(line.replace("$PBS_JOBID", "8817").rstrip('"').replace('"cd ', "cd "))
    if environ.get("LSF_PM_TASKID"):
        environ = {**environ, "LSF_PM_TASKID": "1"}
    config = started(words, {**environ, "MASTER_ADDR": "node1"})
    assert config.hosts.most in {2, 4}
    assert config.nproc_per_node == 8
    # Ranks are captured after half of it, and the report is written once they are killed.
    assert 0 < config.shutdown_timeout_s < sigkill_after_s(name.removesuffix(".sh"))


def test_htcondors_nodes() -> None:
    """The submit file names the script, which exports MASTER_ADDR."""
    submit = (EXAMPLES / "schedulers" / "htcondor.sub").read_text(encoding="utf-8")
    settings = dict(re.findall(r"^\+?(\w+) = (.*)$", submit, re.MULTILINE))
    assert (settings["universe"], settings["machine_count"]) == ("parallel", HTCONDOR["_CONDOR_NPROCS"])
    assert (EXAMPLES / "schedulers" / settings["executable"]).exists()
    assert submit.rstrip().endswith("\nqueue")
    config = started(["saferun", *shlex.split(settings["arguments"])], {**HTCONDOR, "MASTER_ADDR": "node1"})
    assert (place(config), config.nproc_per_node) == ((4, 4, 2), 8)


@pytest.mark.parametrize("page", ["README.md", "docs/several-hosts.md", "examples/schedulers/slurm.sh"])
def test_slurm_does_not_end_a_job_whose_spare_takes_over(page: str) -> None:
    """It ends a job when a host fails, and with KillOnBadExit=1 in slurm.conf when a saferun is killed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.search(r"\bsrun -.*saferun .*--spares \d", line)]
    assert lines
    for line in lines:
        assert {"--no-kill", "--kill-on-bad-exit=0"} <= set(line.partition(" saferun ")[0].split())
