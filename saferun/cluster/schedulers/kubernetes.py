"""Kubernetes: what a PyTorchJob, a LeaderWorkerSet, and an indexed Job (of a JobSet, too) tell their pods.

A TrainJob (Kubeflow Trainer 2) tells all of it in PET_*, which are torchrun's own.
"""

from __future__ import annotations

import re

from saferun.cluster.schedulers.allocation import MOST_LISTED, Allocation, Surroundings, named_master, number

_HOSTS_FILE = "/etc/hosts"


def kubernetes(surroundings: Surroundings) -> Allocation | None:
    """The place of a pod.

    A PyTorchJob's pods get the hosts' number and their own as WORLD_SIZE and RANK, newer releases multiplying
    the former by the ranks a pod and setting PET_NNODES as well. Pods with PET_* for a rendezvous get all of it from
    those, as torchrun would be. A LeaderWorkerSet's pods get LWS_*. An indexed Job tells a pod its number and, where
    the pods have a headless service, by its name in /etc/hosts what the first pod is called.

    See https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/,
    https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/,
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode and
    https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/.
    """
    environ = surroundings.environ
    if "KUBERNETES_SERVICE_HOST" not in environ or "PET_RDZV_ENDPOINT" in environ:
        return None
    return _pytorch_job(surroundings) or _leader_worker_set(surroundings) or _indexed_job(surroundings)


def _pytorch_job(surroundings: Surroundings) -> Allocation | None:
    environ = surroundings.environ
    if "LOCAL_RANK" in environ or "RAY_JOB_ID" in environ:
        return None  # the variables are those of a rank: of Ray Train's workers, or of another launcher within the pod
    master = environ.get("MASTER_ADDR", "")
    port = number(environ, "MASTER_PORT")
    rank = number(environ, "RANK")
    variable = "PET_NNODES" if "PET_NNODES" in environ else "WORLD_SIZE"
    hosts = number(environ, variable, most=MOST_LISTED)
    if not (master and port and hosts) or port >= 1 << 16 or rank is None or rank >= hosts:
        return None
    if not named_master(environ, hosts):
        # Old operators say it so to the first pod; the others need a name. In any other pod it is the user's.
        master = surroundings.host_name
        if rank or not master.partition(".")[0].endswith("-master-0"):
            return None
    return Allocation(
        source="Kubernetes (WORLD_SIZE and RANK of a PyTorchJob)",
        key=f"pytorchjob-{master}",
        hosts=hosts,
        hosts_from=f"{variable}={hosts}",
        node_rank=rank,
        node_rank_from=f"RANK={rank}",
        master_addr=master,
        master_from="MASTER_ADDR",
        master_port=port,
        above=False,
    )


def _leader_worker_set(surroundings: Surroundings) -> Allocation | None:
    """A pod of a LeaderWorkerSet: its group is the job, with the leader as host 0."""
    environ = surroundings.environ
    leader = environ.get("LWS_LEADER_ADDRESS", "")
    hosts = number(environ, "LWS_GROUP_SIZE", most=MOST_LISTED)
    index = number(environ, "LWS_WORKER_INDEX", most=MOST_LISTED)
    if not leader or not hosts or index is None or index >= hosts:
        return None
    return Allocation(
        source="Kubernetes (LWS_WORKER_INDEX of a LeaderWorkerSet)",
        key=f"lws-{leader}",
        hosts=hosts,
        hosts_from=f"LWS_GROUP_SIZE={hosts}",
        node_rank=index,
        node_rank_from=f"LWS_WORKER_INDEX={index}",
        master_addr=leader,
        master_from=f"LWS_LEADER_ADDRESS={leader}",
        above=False,
    )


def _indexed_job(surroundings: Surroundings) -> Allocation | None:
    environ = surroundings.environ
    index = number(environ, "JOB_COMPLETION_INDEX", most=MOST_LISTED)
    if index is None:
        return None
    # Its host name is the job's name and its number, also after a restart; the pod's own name has more behind that.
    name = surroundings.host_name.partition(".")[0]
    job = name.removesuffix(f"-{index}")
    first = _first_pod(surroundings, name, f"{job}-0") if job != name else None
    return Allocation(
        source="Kubernetes (JOB_COMPLETION_INDEX of an indexed Job)",
        key=f"job-{job or 'job'}",
        hosts=None,
        node_rank=index,
        node_rank_from=f"JOB_COMPLETION_INDEX={index}",
        master_addr=first,
        master_from=f"this pod's name in {_HOSTS_FILE}",
        guessed_master=True,
        above=False,
    )


def _first_pod(surroundings: Surroundings, name: str, first: str) -> str | None:
    """``train-0.train.default.svc.cluster.local``, where this pod is ``train-3.train.default.svc.cluster.local``.

    A pod has such a name, in its first line with it, where its spec has the ``subdomain`` of a headless service.
    """
    for line in (surroundings.read_text(_HOSTS_FILE) or "").splitlines():
        names = line.partition("#")[0].split()[1:]
        if name not in names:
            continue
        for full in names:
            own, dot, domain = full.partition(".")
            if own == name and dot and re.fullmatch(r"[A-Za-z0-9.-]{1,250}", domain):
                return f"{first}.{domain}"
    return None
