"""The options of the command line, each in one place."""

from __future__ import annotations

from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Literal

    Kind = Literal["str", "int", "float", "flag", "list", "append"]
else:
    Kind = str


class Option(Value):
    """One option of the command line.

    ``kind`` ``list`` is one value with commas, ``append`` an option that may be given several times.
    ``pet``: whether ``PET_<DEST>`` in the environment gives the default, as torchrun has it. Every option takes its
    default from ``SAFERUN_<DEST>``, and before that from the settings file, but for those with ``asks``: they are
    questions and stand on the command line only.
    ``group`` is the heading in ``--help``; options of torchrun keep torchrun's names, defaults and choices.
    """

    flags: tuple[str, ...]
    dest: str
    kind: Kind
    default: str | int | float | bool | tuple[str, ...] | None
    help: str
    group: str
    choices: tuple[str, ...] | None = None
    pet: bool = True
    metavar: str | None = None
    asks: bool = False

    @property
    def variable(self) -> str:
        """The environment variable of this option."""
        return f"SAFERUN_{self.dest.upper()}"

    @property
    def name(self) -> str:
        """The option as messages write it: its first long flag."""
        return next(flag for flag in self.flags if flag.startswith("--"))


def comma_separated_list(value: str) -> list[str]:
    """``a,b`` -> ``["a", "b"]``; two commas stand for one within an item."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


TYPES: Mapping[Kind, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "list": comma_separated_list,
    "append": str,
}
"""What makes a value of an option's text, by kind."""


PLACE = "ranks and hosts"
RENDEZVOUS = "rendezvous"
WORKERS = "the training script"
OUTPUT = "output"
CHECKS = "preflight checks"
LIFE = "failures and signals"
WATCH = "hangs and crashes"
ENVIRONMENT = "environment of the ranks"
SETTINGS = "settings"

# torch 2.15's torchrun, option by option; tests/test_torchrun_parity.py holds this to the installed torch.
TORCHRUN_OPTIONS: tuple[Option, ...] = (
    Option(
        ("--nnodes",),
        "nnodes",
        "str",
        "1:1",
        "number of hosts, or MIN:MAX for an elastic job",
        PLACE,
        metavar="N[:M]",
    ),
    Option(
        ("--nproc-per-node", "--nproc_per_node"),
        "nproc_per_node",
        "str",
        "1",
        "ranks on this host: a number, auto, cpu, gpu or xpu",
        PLACE,
        metavar="N",
    ),
    Option(("--node-rank", "--node_rank"), "node_rank", "int", 0, "rank of this host, for static rendezvous", PLACE),
    Option(
        ("--rdzv-backend", "--rdzv_backend"),
        "rdzv_backend",
        "str",
        "static",
        "rendezvous backend: static, c10d, etcd, or another one that is registered with torch",
        RENDEZVOUS,
    ),
    Option(
        ("--rdzv-endpoint", "--rdzv_endpoint"),
        "rdzv_endpoint",
        "str",
        "",
        "address of the rendezvous, HOST[:PORT]",
        RENDEZVOUS,
    ),
    Option(("--rdzv-id", "--rdzv_id"), "rdzv_id", "str", "none", "name of the job", RENDEZVOUS),
    Option(
        ("--rdzv-conf", "--rdzv_conf"),
        "rdzv_conf",
        "str",
        "",
        "more settings of the rendezvous: KEY=VALUE,KEY=VALUE",
        RENDEZVOUS,
    ),
    Option(
        ("--standalone",),
        "standalone",
        "flag",
        False,
        "one host, with a free port and a job name of its own; other rendezvous options are ignored",
        RENDEZVOUS,
    ),
    Option(
        ("--master-addr", "--master_addr"),
        "master_addr",
        "str",
        "127.0.0.1",
        "address of the host with rank 0, for static rendezvous",
        RENDEZVOUS,
    ),
    Option(
        ("--master-port", "--master_port"),
        "master_port",
        "int",
        None,
        "port of the store on the host with rank 0 (default: a free one on one host, one that follows from the job "
        "under a scheduler, else 29500)",
        RENDEZVOUS,
    ),
    Option(
        ("--local-addr", "--local_addr"),
        "local_addr",
        "str",
        None,
        "address of this host that the others should use",
        RENDEZVOUS,
    ),
    Option(
        ("--max-restarts", "--max_restarts"),
        "max_restarts",
        "int",
        0,
        "how often the ranks are restarted after a failure",
        LIFE,
        metavar="N",
    ),
    Option(
        ("--monitor-interval", "--monitor_interval"),
        "monitor_interval",
        "float",
        0.1,
        "ignored (torchrun compatibility): exits are detected immediately",
        LIFE,
        metavar="SECONDS",
    ),
    Option(
        ("--start-method", "--start_method"),
        "start_method",
        "str",
        "spawn",
        "ignored (torchrun compatibility): with --run-path ranks are always new processes, as with spawn",
        WORKERS,
        choices=("spawn", "fork", "forkserver"),
    ),
    Option(
        ("--event-log-handler", "--event_log_handler"),
        "event_log_handler",
        "str",
        "null",
        "name of a torch.distributed.elastic event handler that gets torchrun's events",
        OUTPUT,
        metavar="NAME",
    ),
    Option(("--role",), "role", "str", "default", "role of the ranks of this host", PLACE),
    Option(("-m", "--module"), "module", "flag", False, "the script is a Python module, as with python -m", WORKERS),
    Option(
        ("--no-python", "--no_python"),
        "no_python",
        "flag",
        False,
        "run the script itself, without python before it",
        WORKERS,
    ),
    Option(
        ("--run-path", "--run_path"),
        "run_path",
        "flag",
        False,
        "run the script by runpy.run_path, with exceptions recorded; wins over --no-python",
        WORKERS,
    ),
    Option(
        ("--log-dir", "--log_dir"),
        "log_dir",
        "str",
        None,
        "base directory for log files in torchrun's layout",
        OUTPUT,
        metavar="DIR",
    ),
    Option(
        ("-r", "--redirects"),
        "redirects",
        "str",
        "0",
        "streams that go to log files only: 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:N,LOCAL_RANK:N",
        OUTPUT,
    ),
    Option(
        ("-t", "--tee"),
        "tee",
        "str",
        "0",
        "streams that go to log files and the console, in the format of --redirects",
        OUTPUT,
    ),
    Option(
        ("--local-ranks-filter", "--local_ranks_filter"),
        "local_ranks_filter",
        "str",
        "",
        "only these local ranks appear on the console, as 0,1,2",
        OUTPUT,
        metavar="RANKS",
    ),
    Option(
        ("--duplicate-stdout-filters", "--duplicate_stdout_filters"),
        "duplicate_stdout_filters",
        "list",
        (),
        "lines of teed stdout with one of these texts also go to filtered_stdout.log; a comma in a text is written ,,",
        OUTPUT,
        metavar="TEXT,TEXT",
    ),
    Option(
        ("--duplicate-stderr-filters", "--duplicate_stderr_filters"),
        "duplicate_stderr_filters",
        "list",
        (),
        "the same for stderr and filtered_stderr.log",
        OUTPUT,
        metavar="TEXT,TEXT",
    ),
    Option(
        ("--log-line-prefix-template", "--log_line_prefix_template"),
        "log_line_prefix_template",
        "str",
        "",
        "prefix of console lines with torchrun's macros ${role_name} ${local_rank} ${rank} ${hostname} "
        "(default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else --prefix)",
        OUTPUT,
        metavar="TEMPLATE",
    ),
    Option(
        ("--logs-specs", "--logs_specs"),
        "logs_specs",
        "str",
        None,
        "entry point in the group torchrun.logs_specs that decides where logs go",
        OUTPUT,
        pet=False,
        metavar="NAME",
    ),
    Option(
        ("--numa-binding", "--numa_binding"),
        "numa_binding",
        "str",
        None,
        "bind each rank to the CPUs near its GPU, as torch.numa.binding has it",
        WORKERS,
        choices=("node", "socket", "exclusive", "core-complex"),
        pet=False,
    ),
    Option(
        ("--signals-to-handle", "--signals_to_handle"),
        "signals_to_handle",
        "str",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "signals that stop the job; each is forwarded to the ranks",
        LIFE,
        metavar="NAMES",
    ),
    Option(
        ("--print-completion", "--print_completion"),
        "print_completion",
        "str",
        None,
        "print a completion script for a shell, and exit; needs the package shtab",
        OUTPUT,
        choices=("bash", "zsh", "tcsh"),
        pet=False,
        asks=True,
    ),
    Option(
        ("--shutdown-timeout", "--shutdown_timeout"),
        "shutdown_timeout",
        "int",
        None,
        "seconds between the signal that stops a rank and SIGKILL (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30)",
        LIFE,
        metavar="SECONDS",
    ),
    Option(
        ("--virtual-local-rank", "--virtual_local_rank"),
        "virtual_local_rank",
        "flag",
        False,
        "every rank has LOCAL_RANK=0 and sees one GPU, its own",
        WORKERS,
    ),
)

SAFERUN_OPTIONS: tuple[Option, ...] = (
    Option(
        ("--scheduler",),
        "scheduler",
        "str",
        "auto",
        "scheduler to take node rank and host list from; auto: detect it; none: command-line options only",
        PLACE,
        choices=("auto", "none", "slurm", "openmpi", "pmi", "kubernetes", "lsf", "pbs"),
        pet=False,
    ),
    Option(
        ("--hosts",),
        "hosts",
        "str",
        "",
        "the hosts of the job in order of node rank, as node[1-4,7],gpu1; this host finds itself in it",
        PLACE,
        pet=False,
        metavar="NAMES",
    ),
    Option(
        ("--hostfile", "--host-file"),
        "hostfile",
        "str",
        "",
        "a file with the hosts of the job, one a line: HOST, HOST slots=N or HOST:N (N ranks)",
        PLACE,
        pet=False,
        metavar="FILE",
    ),
    Option(
        ("--control-port", "--control_port"),
        "control_port",
        "str",
        "auto",
        "port of the first host for saferun's own messages: a number, or same: that of the ranks' store; auto: a "
        "free one, or that of the ranks' store if the hosts reach no other",
        RENDEZVOUS,
        pet=False,
        metavar="PORT",
    ),
    Option(
        ("--secret-file", "--secret_file"),
        "job_secret_file",
        "str",
        "",
        "a file with a secret, the same on all hosts and readable by this user only: messages between hosts are "
        "signed with it, and evidence is encrypted",
        RENDEZVOUS,
        pet=False,
        metavar="FILE",
    ),
    Option(
        ("--sign-messages", "--sign_messages"),
        "sign_messages",
        "str",
        "auto",
        "without --secret-file: sign messages between hosts with a secret that they share over a private channel "
        "(munge, or run directories that all hosts see); auto: if there is such a channel; required: no channel, "
        "no job",
        RENDEZVOUS,
        choices=("auto", "off", "required"),
        pet=False,
    ),
    Option(
        ("--start-timeout", "--start_timeout"),
        "start_timeout",
        "float",
        600.0,
        "seconds to wait for late hosts",
        RENDEZVOUS,
        pet=False,
        metavar="SECONDS",
    ),
    Option(
        ("--preflight",),
        "preflight",
        "str",
        "on",
        "check names, ports, networks, limits and versions before any rank is started; on: abort on errors; warn: "
        "only warn; off: skip; only: check and exit",
        CHECKS,
        choices=("on", "warn", "off", "only"),
        pet=False,
    ),
    Option(
        ("--preflight-full", "--preflight_full"),
        "preflight_full",
        "flag",
        False,
        "test every pair of hosts, on every network interface; without it each host tests a few others",
        CHECKS,
        pet=False,
    ),
    Option(
        ("--nic",),
        "nic",
        "str",
        "",
        "the network interfaces between the hosts: sets the variables of gloo, NCCL, RCCL, UCX; auto: the fastest one "
        "by which all hosts reach each other",
        CHECKS,
        pet=False,
        metavar="NAME,NAME|auto",
    ),
    Option(
        ("--start-retries", "--start_retries"),
        "start_retries",
        "int",
        3,
        "how often a start that failed for a transient reason is retried; a start is over when every rank has got "
        "through init_process_group",
        LIFE,
        pet=False,
        metavar="N",
    ),
    Option(
        ("--leftovers",),
        "leftovers",
        "str",
        "wait",
        "processes that ranks leave behind when all have ended with exit code 0: wait for those that are working "
        "(an upload) and end idle ones, end all, or leave them alone as torchrun does; after a failure they are "
        "ended",
        LIFE,
        choices=("wait", "end", "leave"),
        pet=False,
    ),
    Option(
        ("--leftovers-timeout", "--leftovers_timeout"),
        "leftovers_timeout",
        "float",
        600.0,
        "with --leftovers wait: seconds to wait at most",
        LIFE,
        pet=False,
        metavar="SECONDS",
    ),
    Option(
        ("--retry-wait", "--retry_wait"),
        "retry_wait",
        "float",
        1.0,
        "seconds before the first retry; each further wait is twice as long, plus a random part",
        LIFE,
        pet=False,
        metavar="SECONDS",
    ),
    Option(
        ("--start-window", "--start_window"),
        "start_window",
        "float",
        120.0,
        "seconds after which a start counts as over if the ranks cannot be asked",
        LIFE,
        pet=False,
        metavar="SECONDS",
    ),
    Option(
        ("--retry-always", "--retry_always"),
        "retry_always",
        "flag",
        False,
        "use up all restarts and retries, even if the same failure is bound to repeat",
        LIFE,
        pet=False,
    ),
    Option(
        ("--exclude-bad-hosts", "--exclude_bad_hosts"),
        "exclude_bad_hosts",
        "flag",
        False,
        "in an elastic job, leave out a host that caused the same failure twice, if the others suffice",
        LIFE,
        pet=False,
    ),
    Option(
        ("--host-timeout", "--host_timeout"),
        "host_timeout",
        "float",
        30.0,
        "seconds without a heartbeat after which a host counts as lost",
        LIFE,
        pet=False,
        metavar="SECONDS",
    ),
    Option(
        ("--stop-with-parent", "--stop_with_parent"),
        "stop_with_parent",
        "str",
        "auto",
        "stop the ranks when the parent process exits; auto: if a scheduler or MPI started saferun, not in a shell",
        LIFE,
        choices=("auto", "on", "off"),
        pet=False,
    ),
    Option(
        ("--run-dir", "--run_dir"),
        "run_dir",
        "str",
        None,
        "directory for the files of this run (default: saferun_runs/<time>-<id>); none: no files",
        OUTPUT,
        pet=False,
        metavar="DIR",
    ),
    Option(
        ("--prefix",),
        "prefix",
        "str",
        None,
        "prefix of every output line, from {host} {host_digits} {rank} {local_rank} {role}; none: no prefix "
        "(default: '[{host}:{rank}] ')",
        OUTPUT,
        pet=False,
        metavar="TEMPLATE",
    ),
    Option(
        ("--pty",),
        "pty",
        "str",
        "auto",
        "give the ranks pseudo-terminals; auto: if saferun itself writes to a terminal",
        OUTPUT,
        choices=("auto", "on", "off"),
        pet=False,
    ),
    Option(
        ("--color",),
        "color",
        "str",
        "auto",
        "colour the prefixes by rank; auto: on a terminal, unless NO_COLOR is set",
        OUTPUT,
        choices=("auto", "always", "never"),
        pet=False,
    ),
    Option(
        ("--hang-timeout", "--hang_timeout"),
        "hang_timeout",
        "float",
        300.0,
        "seconds without progress on any rank after which the job is reported as hung; 0: never. The default is "
        "well below NCCL's own timeout of 600 s, which ends the ranks and their stacks with them",
        WATCH,
        pet=False,
        metavar="SECONDS",
    ),
    Option(
        ("--on-hang", "--on_hang"),
        "on_hang",
        "str",
        "report",
        "what to do after a hang was captured and reported: leave the job running, stop it, or restart it (counts "
        "towards --max-restarts)",
        WATCH,
        choices=("report", "stop", "restart"),
        pet=False,
    ),
    Option(
        ("--capture-budget", "--capture_budget"),
        "capture_budget",
        "float",
        20.0,
        "seconds that capturing stacks and process states may take before ranks are stopped; 0: capture nothing",
        WATCH,
        pet=False,
        metavar="SECONDS",
    ),
    Option(
        ("--native-stacks", "--native_stacks"),
        "native_stacks",
        "str",
        "auto",
        "C and C++ frames in captured stacks; auto: of the few ranks that differ from the rest, if their stacks "
        "end in C",
        WATCH,
        choices=("auto", "always", "never"),
        pet=False,
    ),
    Option(
        ("--strace",),
        "strace",
        "flag",
        False,
        "count the system calls of hung ranks for a second, if strace is installed",
        WATCH,
        pet=False,
    ),
    Option(
        ("--cores",),
        "cores",
        "str",
        "backtrace",
        "core files of crashed ranks; backtrace: read the stacks and delete the core; keep: keep it as well; off: "
        "change nothing about cores",
        WATCH,
        choices=("backtrace", "keep", "off"),
        pet=False,
    ),
    Option(
        ("--keep-cores", "--keep_cores"),
        "keep_cores",
        "int",
        4,
        "with --cores keep: how many cores to keep at most, one of each kind of crash",
        WATCH,
        pet=False,
        metavar="N",
    ),
    Option(
        ("--gdb",),
        "gdb",
        "flag",
        False,
        "read cores with gdb as well (slow); without it gdb is used only if pystack is missing",
        WATCH,
        pet=False,
    ),
    Option(
        ("--no-inject", "--no_inject"),
        "no_inject",
        "flag",
        False,
        "do not put saferun's start-up hook into the ranks; without the hook there is no Flight Recorder, and no "
        "stacks if ptrace is denied",
        WATCH,
        pet=False,
    ),
    Option(
        ("--env-profile", "--env_profile"),
        "env_profile",
        "list",
        ("production",),
        "sets of environment variables for the ranks, applied from left to right; see saferunctl env list",
        ENVIRONMENT,
        pet=False,
        metavar="NAME,NAME",
    ),
    Option(
        ("--env-profile-path", "--env_profile_path"),
        "env_profile_path",
        "append",
        (),
        "a directory or file with more env profiles; may be given several times",
        ENVIRONMENT,
        pet=False,
        metavar="PATH",
    ),
    Option(
        ("--env",),
        "env",
        "append",
        (),
        "set this variable for the ranks, whatever a profile or the environment says; may hold {rank}, {local_rank}, "
        "{host}, {run_dir}, {rank_dir}; NAME alone takes the value from the environment, which keeps a secret out of "
        "ps; may be given several times",
        ENVIRONMENT,
        pet=False,
        metavar="NAME[=VALUE]",
    ),
    Option(
        ("--unset",),
        "unset",
        "append",
        (),
        "take this variable out of the environment of the ranks; may be given several times",
        ENVIRONMENT,
        pet=False,
        metavar="NAME",
    ),
    Option(
        ("--vendor",),
        "vendor",
        "str",
        "auto",
        "GPU vendor that the env profiles apply to; auto: that of this host",
        ENVIRONMENT,
        choices=("auto", "nvidia", "amd", "none"),
        pet=False,
    ),
    Option(
        ("--lint",),
        "lint",
        "str",
        "on",
        "check, while the job runs, for variables that nothing installed reads and for values that make no sense",
        ENVIRONMENT,
        choices=("on", "off"),
        pet=False,
    ),
    Option(
        ("--config",),
        "config",
        "str",
        None,
        "a YAML file with settings: OPTION: value (default: ./saferun.yaml, if no other user can write to it)",
        SETTINGS,
        pet=False,
        metavar="FILE",
    ),
    Option(
        ("--show-config", "--show_config"),
        "show_config",
        "flag",
        False,
        "print every setting and where it comes from, and exit",
        SETTINGS,
        pet=False,
        asks=True,
    ),
    Option(
        ("--dry-run", "--dry_run"),
        "dry_run",
        "flag",
        False,
        "print ranks, commands and changes to the environment, and exit",
        SETTINGS,
        pet=False,
        asks=True,
    ),
)

OPTIONS: tuple[Option, ...] = TORCHRUN_OPTIONS + SAFERUN_OPTIONS
