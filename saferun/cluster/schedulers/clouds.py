"""What services that start containers or workers tell them: SageMaker, AWS Batch, Ray Train."""

from __future__ import annotations

from saferun.cluster.schedulers.allocation import MOST_LISTED, MOST_TASKS, Allocation, Surroundings, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_BYTES = 1 << 22
_LONGEST_NAME = 255


def sagemaker(surroundings: Surroundings) -> Allocation | None:
    """The place of a container of a SageMaker training job: the list of hosts has one order everywhere.

    See https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md and
    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html.
    """
    environ = surroundings.environ
    here = environ.get("SM_CURRENT_HOST", "")
    names = _host_names(_json(environ.get("SM_HOSTS", ""))) if here else ()
    if names.count(here) != 1:
        return None
    job = environ.get("TRAINING_JOB_NAME", "")
    if not job:
        described = _json(environ.get("SM_TRAINING_ENV", ""))
        job = str(described.get("job_name") or "") if isinstance(described, dict) else ""
    return Allocation(
        source="SageMaker (SM_HOSTS and SM_CURRENT_HOST)",
        key=f"sagemaker-{job[:_LONGEST_NAME] or 'job'}",
        hosts=len(names),
        hosts_from="SM_HOSTS",
        node_rank=names.index(here),
        node_rank_from=f"SM_CURRENT_HOST={here}",
        names=names,
        master_addr=names[0],
        master_from="the first of SM_HOSTS",
        above=False,
    )


def _host_names(value: Any) -> tuple[str, ...]:  # noqa: ANN401 - JSON
    """The hosts of a list of names; none where it is no such list."""
    if not isinstance(value, list) or not 0 < len(value) <= MOST_LISTED:
        return ()
    names = [name for name in value if isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable()]
    return tuple(names) if len(names) == len(value) else ()


def _json(text: str) -> Any:  # noqa: ANN401 - JSON
    from saferun.text.decoding import loads

    try:
        return loads(text, longest=_MOST_BYTES)
    except ValueError:
        return None


def aws_batch(surroundings: Surroundings) -> Allocation | None:
    """The place of a node of a multi-node parallel job of AWS Batch: its main node is host 0.

    The main node itself has no such variable, and needs none.

    See https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html.
    """
    environ = surroundings.environ
    hosts = number(environ, "AWS_BATCH_JOB_NUM_NODES", most=MOST_LISTED)
    index = number(environ, "AWS_BATCH_JOB_NODE_INDEX", most=MOST_LISTED)
    main = number(environ, "AWS_BATCH_JOB_MAIN_NODE_INDEX", most=MOST_LISTED)
    if not hosts or index is None or main is None or index >= hosts or main >= hosts:
        return None
    address = environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "")
    if index == main:
        address = surroundings.host_name
    # Each node of the job has the job's id with its own number behind it.
    job = environ.get("AWS_BATCH_JOB_ID", "").rpartition("#")[0] or environ.get("AWS_BATCH_JOB_ID", "job")
    return Allocation(
        source="AWS Batch (AWS_BATCH_JOB_NODE_INDEX of a multi-node job)",
        key=f"batch-{job}",
        hosts=hosts,
        hosts_from=f"AWS_BATCH_JOB_NUM_NODES={hosts}",
        node_rank=0 if index == main else index + (index < main),
        node_rank_from=f"AWS_BATCH_JOB_NODE_INDEX={index}, AWS_BATCH_JOB_MAIN_NODE_INDEX={main}",
        master_addr=address or None,
        master_from="AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
        above=False,
    )


def ray_train(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that a worker of Ray Train started, by the variables that its backend for torch sets.

    Nothing else of Ray tells a process a rank. Ray's own process group listens at MASTER_PORT: the job needs another.

    Source: python/ray/train/torch/config.py of Ray (_set_torch_distributed_env_vars).
    """
    environ = surroundings.environ
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    local_rank = number(environ, "LOCAL_RANK", most=MOST_TASKS)
    local_size = number(environ, "LOCAL_WORLD_SIZE", most=MOST_TASKS)
    node_rank = number(environ, "NODE_RANK", most=MOST_LISTED)
    if "RAY_JOB_ID" not in environ or node_rank is None or rank is None or local_rank is None:
        return None
    if not size or not local_size or not rank < size or not local_rank < local_size <= size:
        return None
    # Workers of a node have neighbouring ranks; unequal nodes do not follow from this.
    if size % local_size or rank != node_rank * local_size + local_rank:
        return None
    port = environ.get("MASTER_PORT", "")
    return Allocation(
        source=f"Ray Train, job {environ['RAY_JOB_ID']}",
        key=f"ray-{environ['RAY_JOB_ID']}-{environ.get('MASTER_ADDR', '')}-{port}",
        hosts=size // local_size,
        hosts_from=f"WORLD_SIZE={size}, LOCAL_WORLD_SIZE={local_size}",
        node_rank=node_rank,
        node_rank_from=f"NODE_RANK={node_rank}",
        local_rank=local_rank,
        tasks=local_size,
        tasks_from=f"LOCAL_WORLD_SIZE={local_size}",
        master_addr=environ.get("MASTER_ADDR") or None,
        master_from="MASTER_ADDR",
        guessed_master=True,
    )
