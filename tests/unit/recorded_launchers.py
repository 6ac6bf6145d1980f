"""The environments that launchers gave to processes of a job, as recorded, without what has no bearing on the place.

Four hosts, node1 to node4, if nothing else is said.
"""

from __future__ import annotations

PLAIN = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PWD": "/srv/job",
    "SHELL": "/bin/bash",
    "USER": "root",
}

# What the job that a step belongs to leaves in the environment: it had more hosts than the step.
_SLURM_JOB = {
    "SLURMD_NODENAME": "node3",
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_CPUS_PER_NODE": "2(x6)",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node[1-6]",
    "SLURM_JOB_NUM_NODES": "6",
    "SLURM_JOB_PARTITION": "all",
    "SLURM_JOB_UID": "0",
    "SLURM_JOB_USER": "root",
    "SLURM_NODELIST": "node[1-6]",
    "SLURM_SUBMIT_DIR": "/srv/job",
    "SLURM_SUBMIT_HOST": "node1",
    "HOSTNAME": "node1",
}

SLURM_BATCH_SCRIPT = {
    **PLAIN,
    **_SLURM_JOB,
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "node1",
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "6",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x6)",
    "SLURM_TASK_PID": "901",
}

# A shell that salloc opened on the first host, where LaunchParameters=use_interactive_step.
SLURM_INTERACTIVE_STEP = {
    **SLURM_BATCH_SCRIPT,
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}

# The same on the host where salloc was called, without that setting: the job's variables, and nothing of a task.
SLURM_LOGIN_SHELL = {
    **PLAIN,
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[1-6]",
    "SLURM_JOB_NUM_NODES": "6",
    "SLURM_JOB_PARTITION": "all",
    "SLURM_NNODES": "6",
    "SLURM_NODELIST": "node[1-6]",
    "SLURM_SUBMIT_DIR": "/srv/job",
    "SLURM_SUBMIT_HOST": "node1",
    "SLURM_TASKS_PER_NODE": "1(x6)",
}


def slurm_step(
    node: int, proc: int, local: int, *, nodes: str, hosts: int, tasks: int, tasks_by_host: str, gtids: str = "0"
) -> dict[str, str]:
    """A task of ``srun`` within the job."""
    return {
        **PLAIN,
        **_SLURM_JOB,
        "PMI_FD": "17",
        "SLURMD_NODENAME": f"node{node + 1}",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_GTIDS": gtids,
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        "SLURM_LOCALID": str(local),
        "SLURM_NNODES": str(hosts),
        "SLURM_NODEID": str(node),
        "SLURM_NPROCS": str(tasks),
        "SLURM_NTASKS": str(tasks),
        "SLURM_PROCID": str(proc),
        "SLURM_SRUN_COMM_HOST": "10.0.0.1",
        "SLURM_SRUN_COMM_PORT": "40613",
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_LAUNCHER_PORT": "40613",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(hosts),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": tasks_by_host,
        "SLURM_TASKS_PER_NODE": tasks_by_host,
        "SLURM_TASK_PID": "1201",
        "SLURM_UMASK": "0022",
        "SRUN_DEBUG": "3",
    }


SLURM_TASK_A_HOST = slurm_step(2, 2, 0, nodes="node[1-4]", hosts=4, tasks=4, tasks_by_host="1(x4)", gtids="2")
SLURM_TASK_A_RANK = slurm_step(2, 5, 1, nodes="node[1-4]", hosts=4, tasks=8, tasks_by_host="2(x4)", gtids="4,5")
SLURM_UNEQUAL = slurm_step(0, 2, 2, nodes="node[1,3-4]", hosts=3, tasks=5, tasks_by_host="3,1(x2)", gtids="0,1,2")
# srun --mpi=pmi2
SLURM_PMI2 = {
    **SLURM_TASK_A_RANK,
    "PMI_FD": "15",
    "PMI_JOBID": "4711.0",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "SLURM_MPI_TYPE": "pmi2",
    "SLURM_PMI2_PROC_MAPPING": "(vector,(0,4,2))",
}
# srun -N2 python a.py : -N1 -n2 python a.py in a job of two components; the job's variables are those of the first.
SLURM_HETEROGENEOUS = {
    **slurm_step(2, 3, 1, nodes="node[1-2],gpu7", hosts=3, tasks=4, tasks_by_host="1(x2),2", gtids="2,3"),
    "SLURMD_NODENAME": "gpu7",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "4711",
    "SLURM_JOB_ID_HET_GROUP_1": "4712",
    "SLURM_JOB_NODELIST": "node[1-2],gpu7",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu7",
    "SLURM_NODELIST": "node[1-2],gpu7",
}


def open_mpi_4(
    node: int, rank: int, local: int, *, size: int, local_size: int, hosts: int, regex: str = "node[1:1-4]@0(4)"
) -> dict[str, str]:
    """A process of mpirun 4.1.4 that was started from node1, with the number of its daemon."""
    daemon = "2102788096"
    head = {"OMPI_MCA_orte_node_regex": regex} if node else {}
    return {
        **PLAIN,
        **head,
        "OMPI_APP_CTX_NUM_PROCS": str(size),
        "OMPI_COMMAND": "python",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_FIRST_RANKS": "0",
        "OMPI_MCA_ess": "^singleton",
        "OMPI_MCA_ess_base_jobid": "2102788097",
        "OMPI_MCA_ess_base_vpid": str(rank),
        "OMPI_MCA_orte_ess_node_rank": str(local),
        "OMPI_MCA_orte_ess_num_procs": str(size),
        "OMPI_MCA_orte_hnp_uri": f"{daemon}.0;tcp://10.0.0.1,172.17.0.1:47923",
        "OMPI_MCA_orte_launch": "1",
        "OMPI_MCA_orte_local_daemon_uri": f"{daemon}.{node};tcp://10.0.0.{node + 1},172.17.0.1:58911",
        "OMPI_MCA_orte_num_nodes": str(hosts),
        "OMPI_NUM_APP_CTX": "1",
        "OMPI_UNIVERSE_SIZE": "8",
        "PMIX_HOSTNAME": f"node{node + 1}",
        "PMIX_ID": f"2102788097.{rank}",
        "PMIX_NAMESPACE": "2102788097",
        "PMIX_RANK": str(rank),
        "PMIX_SERVER_URI2": f"{daemon}.{node};tcp4://127.0.0.1:49159",
        "PMIX_VERSION": "4.2.2rc2",
    }


def open_mpi_5(daemon: int, rank: int, local: int, *, size: int, local_size: int) -> dict[str, str]:
    """A process of Open MPI 5.0.11's mpirun on node1, which tells neither the number of hosts nor their names."""
    uri = f"prterun-node1-71423@0.{daemon};tcp4://127.0.0.1:34023"
    return {
        **PLAIN,
        "OMPI_ARGV": "-m saferun train.py",
        "OMPI_COMMAND": "python",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_MCA_num_procs": str(size),
        "OMPI_TOOL_NAME": "mpirun",
        "OMPI_UNIVERSE_SIZE": "8",
        "OMPI_VERSION": "5.0.11",
        "OMPI_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_WORLD_SIZE": str(size),
        "PMIX_HOSTNAME": f"node{daemon + 1}",
        "PMIX_NAMESPACE": "prterun-node1-71423@1",
        "PMIX_RANK": str(rank),
        "PMIX_SERVER_URI2": uri,
        "PMIX_SERVER_URI41": uri,
        "PMIX_VERSION": "5.0.11rc1",
        "PRTE_LAUNCHED": "1",
    }


def prted(daemon: int, daemons: int) -> list[list[str]]:
    """The command lines above such a process, on another host than mpirun's."""
    uri = "prterun-node1-71423@0.0;tcp://10.77.0.1,172.17.0.1:39701:64,16,16"
    options = f"ess env --prtemca ess_base_nspace prterun-node1-71423@0 --prtemca ess_base_vpid {daemon}"
    more = f"--prtemca ess_base_num_procs {daemons} --prtemca prte_hnp_uri {uri} --prtemca plm ssh --tree-spawn"
    return [
        [*f"/opt/openmpi/bin/prted --prtemca {options} {more}".split()],
        ["sshd: root@notty"],
        ["sshd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups"],
    ]


# What mpirun leaves in the processes of a Slurm job: Slurm's variables tell of its own daemons, which are three.
OPEN_MPI_IN_SLURM = {
    **slurm_step(1, 1, 0, nodes="node[2-4]", hosts=3, tasks=3, tasks_by_host="1(x3)", gtids="1"),
    **open_mpi_4(2, 4, 0, size=8, local_size=2, hosts=4),
}
OPEN_MPI_IN_SLURM_HEAD = {**SLURM_BATCH_SCRIPT, **open_mpi_4(0, 1, 1, size=8, local_size=2, hosts=4)}


def hydra(node: int, rank: int, local: int, *, size: int, local_size: int) -> dict[str, str]:
    """A process of MPICH 4.0's mpiexec."""
    return {
        **PLAIN,
        "HYDI_CONTROL_FD": "7",
        "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": f"node{node + 1}",
        "MPI_LOCALNRANKS": str(local_size),
        "MPI_LOCALRANKID": str(local),
        "PMI_FD": "6",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
    }


def hydra_proxy(node: int, host: str = "node1") -> list[list[str]]:
    """The command lines above such a process."""
    options = f"--control-port {host}:37517 --rmk user --launcher ssh --demux poll --pgid 0 --retries 10 --usize -2"
    return [
        ["sh", "-c", "python -m saferun train.py"],
        [*f"/usr/bin/hydra_pmi_proxy {options} --proxy-id {node}".split()],
        ["sshd: root@notty"],
    ]


def intel_mpi(rank: int, local: int, *, size: int, local_size: int, launcher: str = "ssh") -> dict[str, str]:
    """A process of Intel MPI 2021.19's mpiexec, started from node1."""
    node = rank // local_size
    ssh = {"SSH_CONNECTION": f"10.77.0.1 52140 10.77.0.{node + 1} 22"} if node and launcher == "ssh" else {}
    return {
        **PLAIN,
        **ssh,
        "HYDRA_BSTRAP_LAUNCHER": launcher,
        "HYDRA_BSTRAP_LOCALHOST": f"node{node + 1}",
        "HYDRA_BSTRAP_NODE_ID": str(node),
        "HYDRA_BSTRAP_PROXY_ID": str(node),
        "HYDRA_BSTRAP_TREE_WIDTH": "16",
        "HYDRA_BSTRAP_UPSTREAM_FD": "3",
        "I_MPI_HYDRA_UUID": "81000000-a051-abe6-1d61-0600c787c41b",
        "I_MPI_INFO_NUMA_NODE_NUM": "1",
        "MPI_LOCALNRANKS": str(local_size),
        "MPI_LOCALRANKID": str(local),
        "PMI_FD": "6",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
    }


def intel_proxy(node: int) -> list[list[str]]:
    """The command lines above such a process."""
    proxy = [*"/opt/intel/oneapi/mpi/2021.19/bin//hydra_pmi_proxy --usize -1 --auto-cleanup 1 --abort-signal 9".split()]
    if node:
        return [proxy, ["sshd: root@notty"], ["sshd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups"]]
    return [proxy, [*"/opt/intel/oneapi/mpi/2021.19/bin/mpiexec.hydra -ppn 2 -n 8 python -m saferun train.py".split()]]


# Intel MPI within a Slurm job starts its proxies with srun.
INTEL_MPI_IN_SLURM = {
    **slurm_step(2, 2, 0, nodes="node[1-4]", hosts=4, tasks=4, tasks_by_host="1(x4)", gtids="2"),
    **intel_mpi(5, 1, size=8, local_size=2, launcher="slurm"),
}
INTEL_PROXY_IN_SLURM = [intel_proxy(2)[0], ["slurmstepd: [4711.0]"]]


def mvapich2(node: int, rank: int, local: int, *, size: int, local_size: int, hosts: int) -> dict[str, str]:
    """A process of MVAPICH2's mpirun_rsh on node1.

    Source: src/pm/mpirun/mpispawn.c (setup_global_environment, setup_local_environment) and mpirun_rsh.c of MVAPICH2.
    """
    return {
        **PLAIN,
        "MPIRUN_ID": "3187",
        "MPIRUN_NPROCS": str(size),
        "MPIRUN_RSH_LAUNCH": "1",
        "MPISPAWN_CHECKIN_PORT": "41207",
        "MPISPAWN_GLOBAL_NPROCS": str(size),
        "MPISPAWN_ID": str(node),
        "MPISPAWN_LOCAL_NPROCS": str(local_size),
        "MPISPAWN_MPIRUN_HOST": "node1",
        "MPISPAWN_MPIRUN_ID": "3187",
        "MPISPAWN_NNODES": str(hosts),
        "MV2_COMM_WORLD_LOCAL_RANK": str(local),
        "MV2_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "MV2_COMM_WORLD_RANK": str(rank),
        "MV2_COMM_WORLD_SIZE": str(size),
        "MV2_NODE_ID": str(node),
        "MV2_NUM_NODES_IN_JOB": str(hosts),
        "PMI_ID": str(rank),
        "PMI_PORT": f"node{node + 1}:35211",
        "USE_LINEAR_SSH": "1",
    }


def mvapich2_tree(node: int, rank: int, local: int) -> dict[str, str]:
    """The same of a job whose mpispawns start each other: four hosts with two processes each."""
    ranks = ":".join(f"node{i + 1}:2:{2 * i}:{2 * i + 1}" for i in range(4))
    parent = {"MPISPAWN_MPIRUN_HOST": "node2", "MPISPAWN_HOSTLIST": ranks, "USE_LINEAR_SSH": "0"}
    return {**mvapich2(node, rank, local, size=8, local_size=2, hosts=4), **parent}
