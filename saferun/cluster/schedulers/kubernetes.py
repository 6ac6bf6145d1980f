"""Kubernetes: what the operator of a PyTorchJob, or an indexed Job, tells its pods."""

from __future__ import annotations

from saferun.cluster.schedulers.allocation import MOST_HOSTS, Allocation, Surroundings, number


def kubernetes(surroundings: Surroundings) -> Allocation | None:
    """The place of a pod.

    A PyTorchJob's pods get the hosts' number and their own as WORLD_SIZE and RANK, newer releases multiplying
    the former by the ranks a pod and setting PET_NNODES as well. Pods with PET_* for a rendezvous get all of it from
    those, as torchrun would be. An indexed Job tells a pod its number and nothing else.

    See https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/ and
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode.
    """
    environ = surroundings.environ
    if "KUBERNETES_SERVICE_HOST" not in environ or "PET_RDZV_ENDPOINT" in environ:
        return None
    return _pytorch_job(surroundings) or _indexed_job(surroundings)


def _pytorch_job(surroundings: Surroundings) -> Allocation | None:
    environ = surroundings.environ
    master = environ.get("MASTER_ADDR", "")
    port = number(environ, "MASTER_PORT")
    rank = number(environ, "RANK")
    variable = "PET_NNODES" if "PET_NNODES" in environ else "WORLD_SIZE"
    hosts = number(environ, variable, most=MOST_HOSTS)
    if not (master and port and hosts) or port >= 1 << 16 or rank is None or rank >= hosts:
        return None
    if rank == 0 and master in {"localhost", "127.0.0.1"}:
        master = surroundings.host_name or master  # old operators say it so; the others need a name
    return Allocation(
        source="Kubernetes (WORLD_SIZE and RANK of a PyTorchJob)",
        key=f"pytorchjob-{master}",
        hosts=hosts,
        hosts_from=f"{variable}={hosts}",
        node_rank=rank,
        node_rank_from=f"RANK={rank}",
        master_addr=master,
        master_port=port,
        above=False,
    )


def _indexed_job(surroundings: Surroundings) -> Allocation | None:
    environ = surroundings.environ
    index = number(environ, "JOB_COMPLETION_INDEX")
    if index is None:
        return None
    # Its host name is the job's name and its number.
    job = surroundings.host_name.partition(".")[0].removesuffix(f"-{index}") or "job"
    return Allocation(
        source="Kubernetes (JOB_COMPLETION_INDEX of an indexed Job)",
        key=f"job-{job}",
        hosts=None,
        node_rank=index,
        node_rank_from=f"JOB_COMPLETION_INDEX={index}",
        guessed_master=True,
        above=False,
    )
