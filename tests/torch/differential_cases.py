"""The jobs that torchrun and saferun are compared by, one line each where one line is enough."""

from __future__ import annotations

import os
import signal

from tests.torch.differential import Allowed, Case
from tests.unit.recorded_launchers import PLAIN, slurm_step

# Handed to the script as they are given, substituted, or eaten.
ODD_ARGUMENTS = ("--", "--lr", "1", "$$", "${local_rank}", "$local_rank-$$x", "${other}", "$5", "", "a b", "é\n", "--")

STALE = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"), "9") | {
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "9",
    "ROLE_NAME": "stale",
    "TORCHELASTIC_RESTART_COUNT": "9",
    "TORCHELASTIC_RUN_ID": "stale",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
}

INHERITED = """
import resource, signal
os.umask(0o27); os.nice(3); resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
signal.signal(signal.SIGUSR2, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
"""
TWO_CPUS = "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])"
CPUS = min(2, len(os.sched_getaffinity(0)))
# Entry points for --logs-specs: one that changes nothing, and one that adds, changes and deletes variables.
PLUGIN = """
folder = os.environ["PROBE_JOB"] + "/plugin"
os.makedirs(folder + "/plugin-1.0.dist-info", exist_ok=True)
os.environ["PYTHONPATH"] = folder + ":" + os.environ["PYTHONPATH"]
for name, text in {
    "plugin-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: plugin\\nVersion: 1.0\\n",
    "plugin-1.0.dist-info/entry_points.txt": "[torchrun.logs_specs]\\nbare = plugin:Bare\\nbusy = plugin:Busy\\n",
    "plugin.py": '''
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

class Bare(DefaultLogsSpecs):
    pass

class Busy(DefaultLogsSpecs):
    def reify(self, envs):
        for local_rank, env in envs.items():
            handed = repr(sorted(env.items()))
            env |= {"HANDED": handed, "NUMBER": f"{local_rank} of {len(envs)}", "ROLE_NAME": "of the plugin"}
            for name in ("GROUP_RANK", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
                del env[name]
        del envs[1]["CUDA_VISIBLE_DEVICES"]
        return super().reify(envs)
''',
}.items():
    with open(folder + "/" + name, "w") as file:
        file.write(text)
"""
OF_THE_USER = {"OMP_NUM_THREADS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "CUDA_VISIBLE_DEVICES": "4, 5"}

TWO = ("--nproc-per-node", "2")
LOGS = ("--log-dir", "@job@/logs")
REPORT = {"TORCHELASTIC_ERROR_FILE": "@job@/report.json"}
# Each launcher of a case has an error file of its own, below the log folder, whose files are compared.
OWN_REPORTS = """
host = next((word[-1] for word in sys.argv if word.startswith("--node-rank=")), "alone")
os.makedirs(folder := os.environ["PROBE_JOB"] + "/logs/host" + host)
os.environ["TORCHELASTIC_ERROR_FILE"] = folder + "/error.json"
"""
TWO_HOSTS = ("--nnodes=2", "--master-addr=127.0.0.1", "--master-port=@port@")
FIRST_AND_SECOND = (("--node-rank=0",), ("--node-rank=1",))
FAILS_OF = 'report {"message": {"message": "rank %d", "extraInfo": {"py_callstack": "none", "timestamp": "1"}}}'
OF_SLURM = slurm_step(0, 1, 1, nodes="node1", hosts=1, tasks=2, tasks_by_host="2", gtids="0,1")
OF_SLURM = {name: value for name, value in OF_SLURM.items() if name not in PLAIN}
C10D = ("--nnodes=2", "--rdzv-backend=c10d")
PEERS_WAIT = {"0": ["wait"], "2": ["wait"]}

SPAWNED = (
    Allowed(
        r"rank \d+ attempt \d+: (command line|open files)",
        "torchrun carries a function into the process by multiprocessing, and its pipes and words show there",
    ),
    Allowed(
        r"rank \d+ attempt \d+: leads its (session|process group)",
        "a rank in the launcher's own process group gets the terminal's Ctrl-C twice, and its children escape a stop",
    ),
)
NARROWER = (
    Allowed(
        r"rank \d+ attempt \d+: ((stdin|stdout|stderr) terminal size|environment: COLUMNS)",
        "a progress bar as wide as the terminal would wrap behind the prefix that saferun writes before it",
    ),
)
TRACEBACK_LOGGED = (
    Allowed(
        r"rank \d+ attempt \d+: environment: TORCHINDUCTOR_CACHE_DIR",
        "torch sets the variable, to what it is by default, when its launcher logs a traceback",
    ),
)
OWN_CRASH = (Allowed(r"launcher's error file", "torchrun breaks on such a report, and files its own JSONDecodeError"),)

CASES = (
    # ----------------------------------------------------------------------------------------- how the job is formed
    Case("one_rank", does={"*": ["connect"]}),
    Case("two_ranks", TWO, ranks=2),
    Case("three_ranks", ("--nproc_per_node=3", "--nnodes=1:1", "--monitor-interval=0.3"), ranks=3),
    Case("ranks_by_cpus", ("--nproc-per-node", "cpu"), setup=TWO_CPUS, ranks=CPUS),
    Case(
        "ranks_by_devices_where_there_are_none",
        ("--nproc-per-node=auto",),
        env={"CUDA_VISIBLE_DEVICES": ""},
        setup=TWO_CPUS,
        ranks=CPUS,
    ),
    Case(
        "standalone_ignores_all_addresses",
        ("--standalone", "--rdzv-id=job7", "--rdzv-endpoint=192.0.2.1:9", "--master-addr=192.0.2.1", "--master-port=9"),
    ),
    Case("without_a_port_id_and_address_are_ignored", ("--rdzv-id", "job7", "--master-addr", "192.0.2.1")),
    Case("master_port", ("--master-port", "@port@"), does={"*": ["connect"]}),
    Case("master_address", ("--master-addr=localhost", "--master-port=@port@", "--rdzv-id=job7", "--local-addr=x")),
    Case(
        "static_endpoint_and_an_empty_id", ("--rdzv-backend=static", "--rdzv-endpoint=localhost:@port@", "--rdzv-id=")
    ),
    Case(
        "static_endpoint_wins_over_master", ("--rdzv-endpoint=127.0.0.1:@port@", "--master-addr=x", "--master-port=9")
    ),
    Case(
        "c10d_endpoint",
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:@port@", "--rdzv-id=job7", "--node-rank=3", *TWO),
        does={"*": ["connect"]},
        ranks=2,
    ),
    Case(
        "c10d_local_address",
        ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--rdzv-conf=timeout=9"),
    ),
    Case("c10d_file_store", ("--rdzv-backend=c10d", "--rdzv-endpoint=@job@/store", "--rdzv-conf=store_type=file")),
    Case(
        "store_not_shared",
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_WORKER_IDENTICAL": "1"},
        does={"*": ["connect"]},
    ),
    # Nobody else comes, and each of these says for how long that is waited for; else it would be minutes.
    Case(
        "static_timeout_of_the_first_host",
        ("--nnodes=2", "--node-rank=0", "--master-port=@port@", "--rdzv-conf=timeout=2"),
        ranks=0,
        exit_code=1,
    ),
    Case(
        "static_timeout_of_the_second_host",
        ("--nnodes=2", "--node-rank=1", "--master-port=@port@", "--rdzv-conf=timeout=2"),
        ranks=0,
        exit_code=1,
    ),
    Case(
        "c10d_join_timeout",
        (*C10D, "--rdzv-endpoint=localhost:@port@", "--rdzv-conf=join_timeout=2,last_call_timeout=1,close_timeout=2"),
        ranks=0,
        exit_code=1,
    ),
    Case(
        "c10d_read_timeout",
        (*C10D, "--rdzv-endpoint=127.0.0.1:@port@", "--rdzv-conf=is_host=0,read_timeout=2"),
        ranks=0,
        exit_code=1,
    ),
    # A task of a step of two, which is none of torchrun's business, nor saferun's where the user says anything of it.
    Case("one_job_a_process_under_a_scheduler", ("--nnodes=1", "--nproc-per-node=1"), env=OF_SLURM),
    Case(
        "c10d_on_a_free_port_under_a_scheduler",
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=7", *TWO),
        env=OF_SLURM,
        ranks=2,
    ),
    Case(
        "two_agents_on_a_host_under_a_scheduler",
        ("--nnodes=2", "--master-addr=127.0.0.1", "--master-port=@port@", *TWO),
        nodes=(("--node-rank=0",), ("--node-rank=1",)),
        env=OF_SLURM,
        does={"*": ["connect"]},
        ranks=4,
    ),
    Case("process_group", ("--standalone", *TWO), does={"*": ["reduce"]}, ranks=2),
    # -------------------------------------------------------------------------------------------- what a rank is told
    Case("role", ("--role", "trainer", "--max-restarts=3", "--start-method=fork")),
    Case("pet_variables", env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r", "PET_MASTER_PORT": "@port@"}, ranks=2),
    Case("stale_variables_of_an_outer_launch", env=STALE),
    Case("omp_threads_are_the_users", TWO, env={"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "3,1"}, ranks=2),
    Case("virtual_local_rank", ("--virtual-local-rank", *TWO), env={"OMP_NUM_THREADS": ""}, ranks=2),
    Case("virtual_local_rank_of_given_devices", ("--virtual-local-rank",), env={"CUDA_VISIBLE_DEVICES": "3, 1"}),
    Case("logs_specs_plugin", ("--logs-specs=bare", *LOGS, *TWO), setup=PLUGIN, ranks=2),
    Case(
        "logs_specs_plugin_and_virtual_local_rank",
        ("--logs-specs=bare", "--virtual-local-rank", *LOGS, *TWO),
        env=OF_THE_USER,
        setup=PLUGIN,
        ranks=2,
    ),
    Case(
        "logs_specs_plugin_that_changes_variables",
        ("--logs-specs=busy", "--master-port=@port@", "--rdzv-id=7", *LOGS, *TWO),
        env=OF_THE_USER,
        setup=PLUGIN,
        ranks=2,
    ),
    Case(
        "logs_specs_plugin_that_deletes_what_the_launcher_has",
        ("--logs-specs=busy", "--master-port=@port@", "--rdzv-id=7", *LOGS, *TWO),
        env={"CUDA_VISIBLE_DEVICES": "4,5", "GROUP_RANK": "9"},
        setup=PLUGIN,
        ranks=2,
    ),
    Case("file_timer", env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
    Case("c_locale", env={"LANG": "C"}),
    Case("unknown_signal_name", ("--signals-to-handle", "SIGTERM,SIGNOPE, SIGINT"), allowed=TRACEBACK_LOGGED),
    # -------------------------------------------------------------------------------------------- how a rank is run
    Case("script_arguments", TWO, arguments=ODD_ARGUMENTS, ranks=2),
    Case("script_name_with_a_dollar", program="@job@/a $probe.py"),
    Case("relative_script", ("--",), program="relative.py", arguments=("--nnodes=3", "-m")),
    Case("folder_as_script", program="package"),
    Case("script_on_stdin", program="-", stdin="import os; os.write(1, b'probe: from stdin;')", ranks=0),
    Case("module", ("-m",), program="package.entry", arguments=("--lr", "$$")),
    Case("shell_script", ("--no-python",), program="@job@/probe.sh", arguments=("-u", "$local_rank")),
    Case("command_on_the_path", ("--no_python", *TWO), program="echo", arguments=("probe: $local_rank;",), ranks=0),
    Case("python_exec", env={"PYTHON_EXEC": "@job@/probe.sh"}),
    Case("run_path", ("--run-path", *TWO), arguments=("$$", "${local_rank}"), ranks=2, allowed=SPAWNED),
    Case("stdin_is_read", stdin="hello\nworld\n", does={"*": ["read"]}),
    Case("settings_of_the_process_are_inherited", setup=INHERITED),
    # --------------------------------------------------------------------------------------------------- how it ends
    Case("exit_code_3", TWO, does=PEERS_WAIT | {"1": ["exit 3"]}, env=REPORT, ranks=2, exit_code=1),
    Case("killed_by_sigkill", TWO, does=PEERS_WAIT | {"1": ["kill SIGKILL"]}, ranks=2, exit_code=1),
    Case("killed_by_sigsegv", does={"0": ["kill SIGSEGV"]}, exit_code=1),
    Case(
        "fails_once",
        ("--max-restarts=2", "-r3", *LOGS, *TWO),
        does={"0@0": ["wait"], "1@0": ["exit 3"]},
        ranks=2,
        attempts=2,
    ),
    Case("fails_too_often", ("--max-restarts", "1"), does={"0": ["exit 3"]}, attempts=2, exit_code=1),
    Case(
        "recorded_exception",
        LOGS,
        does={"0": ["record"]},
        env=REPORT,
        exit_code=1,
    ),
    Case("report_without_details", LOGS, does={"0": ['report {"message": "no details"}']}, env=REPORT, exit_code=1),
    Case("report_that_cannot_be_read", does={"0": ["report {"]}, env=REPORT, exit_code=1, allowed=OWN_CRASH),
    Case(
        "hosts_that_fail_have_an_error_file_each",
        TWO_HOSTS,
        nodes=FIRST_AND_SECOND,
        does={"0": [FAILS_OF % 0], "1": [FAILS_OF % 1]},
        setup=OWN_REPORTS,
        ranks=2,
        exit_code=1,
    ),
    Case(
        "a_host_whose_rank_has_recorded_nothing_has_no_error_file",
        TWO_HOSTS,
        nodes=FIRST_AND_SECOND,
        does={"0": ["exit 3"], "1": [FAILS_OF % 1]},
        setup=OWN_REPORTS,
        ranks=2,
        exit_code=1,
    ),
    Case("run_path_fails", ("--run-path", *LOGS), does={"0": ["raise"]}, env=REPORT, exit_code=1, allowed=SPAWNED),
    Case("sigterm", TWO, does={"*": ["wait"]}, env=REPORT, ranks=2, exit_code=1, sends=(signal.SIGTERM,)),
    Case("sigint", TWO, does={"*": ["wait"]}, ranks=2, exit_code=1, sends=(signal.SIGINT,)),
    Case("sighup", does={"*": ["wait"]}, exit_code=1, sends=(signal.SIGHUP,)),
    Case("sigusr1", ("--signals-to-handle=SIGUSR1",), does={"*": ["wait"]}, exit_code=1, sends=(signal.SIGUSR1,)),
    Case(
        "stubborn_rank",
        ("--shutdown-timeout=1", *TWO),
        does={"1": ["stubborn"], "0": ["wait"]},
        ranks=2,
        exit_code=1,
        sends=(signal.SIGTERM,),
    ),
    Case(
        "stubborn_rank_by_variable",
        does={"*": ["stubborn"]},
        env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"},
        exit_code=1,
        sends=(signal.SIGINT,),
    ),
    Case("terminal", terminal=True, stdin="hello\n", does={"0": ["read"]}, allowed=NARROWER),
    Case(
        "ctrl_c_on_a_terminal",
        TWO,
        terminal=True,
        stdin="\x03",
        does={"*": ["wait"]},
        ranks=2,
        exit_code=1,
        allowed=NARROWER,
    ),
    # ------------------------------------------------------------------------------------------------- where words go
    Case("redirects", ("-r", "3", *LOGS, *TWO), does={"1": ["say probe: unfinished"]}, ranks=2),
    Case("tee", ("-t", "3", *LOGS, *TWO), does={"1": ["say probe: unfinished;"]}, ranks=2),
    Case("redirects_by_rank", ("--redirects=0:1,1:2", "--log_dir=../logs/new", *TWO), ranks=2),
    Case("redirects_and_tee_by_rank", ("-r", "0:3", "-t", "1:1", *LOGS, *TWO), ranks=2),
    Case("ranks_filter", ("--local-ranks-filter=1", *LOGS, *TWO), ranks=2),
    Case("ranks_filter_with_tee", ("--local-ranks-filter=0", "-t", "3", *LOGS, *TWO), ranks=2),
    Case(
        "filtered_copies_of_tee",
        ("--duplicate-stdout-filters=apple,0 a", "--duplicate-stderr-filters=pear", "-t", "3", *LOGS, *TWO),
        ranks=2,
    ),
    Case("filtered_copies_without_tee", ("--duplicate-stdout-filters=apple", "-r", "3", *LOGS)),
    Case("no_log_folder", ("--log-dir", "/dev/null", "-r", "3", "-t", "1")),
    Case(
        "line_prefix",
        ("-t3", "--role=r"),
        env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}$rank$x>"},
        lines=True,
    ),
    Case("events", ("--event-log-handler", "console"), events=True),
    Case("events_of_a_failure", ("--event-log-handler=console",), does={"0": ["exit 3"]}, exit_code=1, events=True),
)
