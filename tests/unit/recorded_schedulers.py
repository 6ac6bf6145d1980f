"""The environments that schedulers and clouds give to processes of a job, without what has no bearing on the place.

As recorded, or as the source says that is named beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.unit.recorded_launchers import PLAIN

_KUBERNETES: Mapping[str, str] = {
    **PLAIN,
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}
PYTORCH_JOB = {
    **_KUBERNETES,
    "HOSTNAME": "train-worker-1",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "0",
    "RANK": "2",
    "WORLD_SIZE": "4",
}
# Releases that multiply WORLD_SIZE by the ranks of a pod.
PYTORCH_JOB_WITH_PET = {
    **PYTORCH_JOB,
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "WORLD_SIZE": "32",
}
PYTORCH_JOB_ELASTIC = {
    **_KUBERNETES,
    "HOSTNAME": "train-worker-1",
    "PET_MAX_RESTARTS": "10",
    "PET_NNODES": "1:4",
    "PET_NPROC_PER_NODE": "2",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "train-worker-0:23456",
    "PET_RDZV_ID": "train",
    "PYTHONUNBUFFERED": "0",
}
TRAIN_JOB = {
    **_KUBERNETES,
    "HOSTNAME": "train-node-0-3",
    "JOB_COMPLETION_INDEX": "3",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "3",
    "PET_NPROC_PER_NODE": "2",
}
INDEXED_JOB = {**_KUBERNETES, "HOSTNAME": "sweep-3", "JOB_COMPLETION_INDEX": "3"}
# Of a pod whose spec has the subdomain of a headless service; the kubelet writes it (pkg/kubelet/kubelet_pods.go).
INDEXED_JOB_HOSTS = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
10.244.1.9\ttrain-3.train.default.svc.cluster.local\ttrain-3
"""
# JobSet: a pod is called <jobset>-<replicated job>-<job index>-<pod index>, below a service of the JobSet's name.
# Source: site/static/examples/simple/jobset-with-network.yaml in kubernetes-sigs/jobset.
JOB_SET = {**_KUBERNETES, "HOSTNAME": "llm-workers-0-2", "JOB_COMPLETION_INDEX": "2"}
JOB_SET_HOSTS = "127.0.0.1\tlocalhost\n10.244.1.9\tllm-workers-0-2.llm.team.svc.cluster.local\tllm-workers-0-2\n"
# LeaderWorkerSet. Source: https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
LEADER_WORKER_SET = {
    **_KUBERNETES,
    "HOSTNAME": "llm-1-2",
    "LWS_GROUP_SIZE": "4",
    "LWS_LEADER_ADDRESS": "llm-1.llm.default",
    "LWS_WORKER_INDEX": "2",
}

LSF_BLAUNCH = {
    **PLAIN,
    "LSB_DJOB_NUMPROC": "16",
    "LSB_HOSTS": " ".join(["node1"] * 8 + ["node2"] * 8),
    "LSB_JOBID": "90210",
    "LSB_MCPU_HOSTS": "node1 8 node2 8 ",
    "LSF_PM_TASKID": "2",
}
LSF_JSRUN = {
    **PLAIN,
    "JSM_NAMESPACE_ID": "1",
    "JSM_NAMESPACE_LOCAL_RANK": "3",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "JSM_NAMESPACE_RANK": "9",
    "JSM_NAMESPACE_SIZE": "12",
    "LSB_JOBID": "90210",
    "LSB_MCPU_HOSTS": "batch2 1 a01n01 42 a01n02 42 ",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_SIZE": "12",
    "PMIX_NAMESPACE": "1",
    "PMIX_RANK": "9",
}
PBS = {
    **PLAIN,
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "8817.pbs01",
    "PBS_NODEFILE": "/var/spool/pbs/aux/8817.pbs01",
    "PBS_NODENUM": "1",
    "PBS_TASKNUM": "20000001",
}
PBS_NODE_FILE = "node1.cluster\nnode1.cluster\nnode2.cluster\nnode2.cluster\n"
# What pbsdsh of OpenPBS has started on the second host: numbered, and not told the file. Source: start_process in
# src/resmom/start_exec.c; finish_exec there for a batch script.
PBS_SPAWNED = {name: value for name, value in PBS.items() if name != "PBS_NODEFILE"}
PBS_BATCH_SCRIPT = {**PBS, "PBS_NODENUM": "0", "PBS_TASKNUM": "1"}

# A batch script of LSF, and what blaunch starts for each slot of a job: the numbers of node2 begin with 9. Source:
# https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-blaunch
LSF_BATCH_SCRIPT = {name: value for name, value in LSF_BLAUNCH.items() if name != "LSF_PM_TASKID"}
LSF_BLAUNCH_A_SLOT = {**LSF_BLAUNCH, "LSF_PM_TASKID": "10"}


def flux(rank: int, local: int, *, size: int, hosts: int) -> dict[str, str]:
    """A task of ``flux run``.

    Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
    """
    return {
        **PLAIN,
        "FLUX_JOB_ID": "\u01922oJiLHBd",
        "FLUX_JOB_NNODES": str(hosts),
        "FLUX_JOB_SIZE": str(size),
        "FLUX_JOB_TMPDIR": "/tmp/flux-8JiqFE/jobtmp-0-2oJiLHBd",
        "FLUX_KVS_NAMESPACE": "job-95286951936",
        "FLUX_TASK_LOCAL_ID": str(local),
        "FLUX_TASK_RANK": str(rank),
        "FLUX_URI": "local:///tmp/flux-8JiqFE/local-0",
        "PMI_FD": "9",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
    }


# A node of a job of HTCondor's parallel universe. Source: src/condor_starter.V6.1/parallel_proc.cpp of HTCondor.
HTCONDOR = {
    **PLAIN,
    "_CONDOR_JOB_AD": "/var/lib/condor/execute/dir_813/.job.ad",
    "_CONDOR_MACHINE_AD": "/var/lib/condor/execute/dir_813/.machine.ad",
    "_CONDOR_NPROCS": "4",
    "_CONDOR_PROCNO": "2",
    "_CONDOR_REMOTE_SPOOL_DIR": "/var/spool/condor/118/0/cluster118.proc0.subproc0",
    "_CONDOR_SCRATCH_DIR": "/var/lib/condor/execute/dir_813",
}
HTCONDOR_JOB_AD = 'Arguments = ""\nClusterId = 118\nMaxHosts = 4\nProcId = 0\n'

# The second container of a training job. Source: ENVIRONMENT_VARIABLES.md of aws/sagemaker-training-toolkit.
SAGEMAKER = {
    **PLAIN,
    "SM_CURRENT_HOST": "algo-2",
    "SM_HOSTS": '["algo-1","algo-2","algo-3"]',
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_NUM_GPUS": "8",
    "SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2","algo-3"]}',
    "SM_TRAINING_ENV": '{"current_host":"algo-2","job_name":"llm-2026-11-25-18-00-00-000"}',
    "SM_USER_ENTRY_POINT": "train.sh",
}


def aws_batch(index: int, main: int = 0) -> dict[str, str]:
    """A node of a multi-node parallel job of four. Source: AWS Batch user guide, mnp-env-vars."""
    address = {} if index == main else {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.5.17"}
    return {
        **PLAIN,
        **address,
        "AWS_BATCH_JOB_ID": f"7c4bb0c2-0000-4c3d-9f4e-1b1d8a3f0a11#{index}",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(main),
        "AWS_BATCH_JOB_NODE_INDEX": str(index),
        "AWS_BATCH_JOB_NUM_NODES": "4",
    }


def ray_train(rank: int, *, size: int, local_size: int) -> dict[str, str]:
    """A worker of Ray Train. Source: _set_torch_distributed_env_vars in python/ray/train/torch/config.py of Ray."""
    return {
        **PLAIN,
        "ACCELERATE_TORCH_DEVICE": "cuda:0",
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "10.0.5.17",
        "MASTER_PORT": "41507",
        "NODE_RANK": str(rank // local_size),
        "RANK": str(rank),
        "RAY_JOB_ID": "02000000",
        "RAY_RAYLET_PID": "811",
        "WORLD_SIZE": str(size),
    }
