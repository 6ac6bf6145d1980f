"""The options of the command line, each in one place."""

from __future__ import annotations

from saferun.model import Defaults, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Literal

    Kind = Literal["str", "int", "float", "flag", "list", "append"]
    Default = str | int | float | bool | tuple[str, ...] | None
else:
    Kind = Default = str


class Option(Value):
    """One option of the command line.

    Attributes:
        flags: every spelling; torchrun's options keep torchrun's names, defaults and choices.
        dest: its name in the settings.
        kind: of its value; ``list`` is one value with commas, ``append`` an option that can be given several times.
        default: its value where nothing is set.
        help: what ``--help`` says.
        group: the heading in ``--help``.
        choices: the values that it takes; None: any.
        metavar: what stands for the value in ``--help``.
        pet: whether ``PET_<DEST>`` in the environment gives the default, as torchrun has it.
        asks: a question, which stands on the command line only. Every other option takes its default from
            ``SAFERUN_<DEST>``, and before that from the settings file.
    """

    flags: tuple[str, ...]
    dest: str
    kind: Kind
    default: Default
    help: str
    group: str
    choices: tuple[str, ...] | None = None
    pet: bool = False
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

HOSTS = "ranks and hosts"
RENDEZVOUS = "rendezvous"
SCRIPT = "the training script"
OUTPUT = "output"
PREFLIGHT = "preflight checks"
FAILURES = "failures and signals"
HANGS = "hangs and crashes"
ENVIRONMENT = "environment of the ranks"
SETTINGS = "settings"

_KINDS: Mapping[type, Kind] = {bool: "flag", int: "int", float: "float"}


def _option(
    usage: str,
    default: Default,
    group: str,
    text: str,
    *,
    kind: Kind | None = None,
    dest: str = "",
    asks: bool = False,
) -> Option:
    """An option from what ``--help`` shows of it: ``-t --tee VALUE``, ``--pty {auto,on,off}``.

    Every long flag can be written with underscores as well. The first one gives the name in the settings; the kind
    follows from the default.
    """
    parts = usage.split(" ")
    value = parts.pop() if parts[-1][0] != "-" else None
    flags: list[str] = []
    for flag in parts:
        flags.append(flag)
        if "-" in flag[2:]:
            flags.append("--" + flag[2:].replace("-", "_"))
    choices = tuple(value[1:-1].split(",")) if value is not None and value[0] == "{" else None
    dest = dest or next(flag for flag in parts if flag[:2] == "--")[2:].replace("-", "_")
    kind = kind or _KINDS.get(type(default), "str")
    metavar = value if choices is None else None
    return Option(tuple(flags), dest, kind, default, text, group, choices, False, metavar, asks)


_NO_PET = frozenset({"logs_specs", "numa_binding", "print_completion"})
# torch 2.15's torchrun, option by option; tests/test_torchrun_parity.py holds this to the installed torch.
_TORCHRUNS = (
    _option("--nnodes N[:M]", "1:1", HOSTS, "number of hosts, or MIN:MAX for an elastic job"),
    _option(
        "--nproc-per-node N", "1", HOSTS, "ranks on this host: a number, or one per device with auto, cpu, gpu or xpu"
    ),
    _option("--node-rank", 0, HOSTS, "node rank of this host, for static rendezvous"),
    _option(
        "--rdzv-backend",
        "static",
        RENDEZVOUS,
        "rendezvous backend: static, c10d, etcd, or another one that is registered with torch",
    ),
    _option("--rdzv-endpoint", "", RENDEZVOUS, "address of the rendezvous, HOST[:PORT]"),
    _option("--rdzv-id", "none", RENDEZVOUS, "ID of the job, the same on all hosts"),
    _option("--rdzv-conf", "", RENDEZVOUS, "more settings of the rendezvous: KEY=VALUE,KEY=VALUE"),
    _option(
        "--standalone",
        False,
        RENDEZVOUS,
        "single-host job: choose a free port and a job ID; other rendezvous options are ignored",
    ),
    _option("--master-addr", "127.0.0.1", RENDEZVOUS, "address of the host of rank 0, for static rendezvous"),
    _option(
        "--master-port",
        None,
        RENDEZVOUS,
        "port of the store on the host of rank 0 (default: a free port on one host, a port derived from the job ID "
        "under a scheduler, else 29500)",
        kind="int",
    ),
    _option("--local-addr", None, RENDEZVOUS, "address of this host for the other hosts to connect to"),
    _option(
        "--max-restarts N",
        0,
        FAILURES,
        "how often to restart the ranks of the whole job after a failure (torchrun: of each host)",
    ),
    _option(
        "--monitor-interval SECONDS", 0.1, FAILURES, "ignored (torchrun compatibility): exits are detected immediately"
    ),
    _option(
        "--start-method {spawn,fork,forkserver}",
        "spawn",
        SCRIPT,
        "ignored (torchrun compatibility): with --run-path ranks are always new processes, as with spawn",
    ),
    _option(
        "--event-log-handler NAME",
        "null",
        OUTPUT,
        "name of a torch.distributed.elastic event handler that gets torchrun's events",
    ),
    _option("--role", "default", HOSTS, "role of the ranks of this host"),
    _option("-m --module", False, SCRIPT, "the script is a Python module, as with python -m"),
    _option("--no-python", False, SCRIPT, "run the script itself, without python before it"),
    _option(
        "--run-path",
        False,
        SCRIPT,
        "run the script with runpy.run_path and record its exceptions; takes precedence over --no-python",
    ),
    _option("--log-dir DIR", None, OUTPUT, "base directory for log files in torchrun's layout"),
    _option(
        "-r --redirects",
        "0",
        OUTPUT,
        "streams to write to log files only: 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:N,LOCAL_RANK:N",
    ),
    _option("-t --tee", "0", OUTPUT, "streams to write to log files and the console, in the format of --redirects"),
    _option("--local-ranks-filter RANKS", "", OUTPUT, "show only these local ranks on the console, as 0,1,2"),
    _option(
        "--duplicate-stdout-filters TEXT,TEXT",
        (),
        OUTPUT,
        "copy lines of teed stdout that contain one of these texts to filtered_stdout.log; write a comma within a "
        "text as ,,",
        kind="list",
    ),
    _option(
        "--duplicate-stderr-filters TEXT,TEXT", (), OUTPUT, "the same for stderr and filtered_stderr.log", kind="list"
    ),
    _option(
        "--log-line-prefix-template TEMPLATE",
        "",
        OUTPUT,
        "prefix of console lines with torchrun's macros ${role_name} ${local_rank} ${rank} ${hostname} (default: "
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else --prefix)",
    ),
    _option(
        "--logs-specs NAME",
        None,
        OUTPUT,
        "entry point in the group torchrun.logs_specs that decides where logs go",
    ),
    _option(
        "--numa-binding {node,socket,exclusive,core-complex}",
        None,
        SCRIPT,
        "bind each rank to the CPUs near its GPU (torch.numa.binding)",
    ),
    _option(
        "--signals-to-handle NAMES",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        FAILURES,
        "signals that stop the job; each is forwarded to the ranks",
    ),
    _option(
        "--print-completion {bash,zsh,tcsh}",
        None,
        OUTPUT,
        "print a shell completion script and exit; needs the package shtab",
        asks=True,
    ),
    _option(
        "--shutdown-timeout SECONDS",
        None,
        FAILURES,
        "seconds from the signal that stops a rank to SIGKILL (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30)",
        kind="int",
    ),
    _option("--virtual-local-rank", False, SCRIPT, "give every rank LOCAL_RANK=0 and let it see only its own GPU"),
)
TORCHRUN_OPTIONS: tuple[Option, ...] = tuple(option._replace(pet=option.dest not in _NO_PET) for option in _TORCHRUNS)

SAFERUN_OPTIONS: tuple[Option, ...] = (
    _option(
        "--scheduler {auto,none,slurm,openmpi,pmi,mvapich,kubernetes,lsf,pbs,flux,htcondor,sagemaker,batch,ray}",
        "auto",
        HOSTS,
        "scheduler to take node rank and host list from; auto: detect it; none: command-line options only",
    ),
    _option(
        "--hosts NAMES",
        "",
        HOSTS,
        "hosts of the job in order of node rank, as node[1-4,7],gpu1; this host finds itself in the list",
    ),
    _option(
        "--hostfile --host-file FILE",
        "",
        HOSTS,
        "file with the hosts of the job, one per line: HOST, HOST slots=N or HOST:N (N ranks)",
    ),
    _option(
        "--control-port PORT",
        "auto",
        RENDEZVOUS,
        "port on the leader (node rank 0) for saferun's own messages: a number; same: the port of the ranks' store; "
        "auto: a free port, or that of the ranks' store if the hosts cannot reach another one",
    ),
    _option(
        "--secret-file FILE",
        "",
        RENDEZVOUS,
        "file with a secret, the same on all hosts and readable by this user only: messages between hosts are "
        "signed with it, and evidence is encrypted",
        dest="job_secret_file",
    ),
    _option(
        "--sign-messages {auto,off,required}",
        Defaults.sign_messages,
        RENDEZVOUS,
        "without --secret-file: sign messages between hosts with a secret exchanged over a private channel (munge, "
        "or run directories that all hosts see); auto: if there is such a channel; required: fail without one",
    ),
    _option("--start-timeout SECONDS", Defaults.start_timeout_s, RENDEZVOUS, "seconds to wait for late hosts"),
    _option(
        "--preflight {on,warn,off,only}",
        Defaults.preflight,
        PREFLIGHT,
        "check names, ports, networks, limits and versions: on several hosts before any rank is started, on one host "
        "mostly while they start; on: abort on errors; warn: only warn; off: skip; only: check and exit",
    ),
    _option(
        "--preflight-full",
        False,
        PREFLIGHT,
        "test every pair of hosts, on every network interface; without it each host tests a few others",
    ),
    _option(
        "--health {quick,full,off}",
        Defaults.health,
        PREFLIGHT,
        "check the health of each host before each attempt: network errors, GPUs, kernel log, storage; full: also "
        "multiply matrices for a second and run an all_reduce on each host, in processes of their own (some ten "
        "seconds)",
    ),
    _option(
        "--health-path PATH",
        (),
        PREFLIGHT,
        "storage that has to answer before an attempt (a warning if it does not); can be given several times",
        kind="append",
    ),
    _option(
        "--nic NAME,NAME|auto",
        "",
        PREFLIGHT,
        "network interfaces to use between hosts: sets the variables of gloo, NCCL, RCCL and UCX; auto: the fastest "
        "interface over which all hosts reach each other (default: each library chooses)",
    ),
    _option(
        "--start-retries N",
        Defaults.start_retries,
        FAILURES,
        "how often to retry a start that failed for a transient reason; a start ends when every rank has returned "
        "from init_process_group",
    ),
    _option(
        "--leftovers {wait,end,leave}",
        Defaults.leftovers,
        FAILURES,
        "processes that ranks leave behind when all have exited with code 0; wait: for those that are busy (an "
        "upload), and terminate idle ones; end: terminate all; leave: leave them running, as torchrun does. After a "
        "failure those in the ranks' sessions are terminated; others with end, or if they hold a GPU or MASTER_PORT or "
        "are ranks of an inner launcher",
    ),
    _option(
        "--leftovers-timeout SECONDS",
        Defaults.leftovers_timeout_s,
        FAILURES,
        "with --leftovers wait: seconds to wait at most",
    ),
    _option(
        "--retry-wait SECONDS",
        Defaults.retry_wait_s,
        FAILURES,
        "seconds before the first retry; each further wait is twice as long, up to a minute; up to as many seconds as "
        "given here are added at random",
    ),
    _option(
        "--start-window SECONDS",
        Defaults.start_window_s,
        FAILURES,
        "seconds after which a start counts as over if the ranks do not report it",
    ),
    _option(
        "--retry-always",
        False,
        FAILURES,
        "use up all restarts and retries, even if the same failure is bound to repeat",
    ),
    _option(
        "--exclude-bad-hosts",
        False,
        FAILURES,
        "in an elastic job, leave out a host that caused the same failure twice, if the others suffice",
    ),
    _option(
        "--exclude-file FILE",
        "",
        FAILURES,
        "file to which hosts are added whose own hardware or system is at fault, one name a line: for srun --exclude",
    ),
    _option(
        "--spares N",
        0,
        FAILURES,
        "number of spare hosts: one takes the place of a host that is at fault or lost; start as many hosts as "
        "--nnodes and --spares together",
    ),
    _option(
        "--restart-limit {total,progress}",
        "total",
        FAILURES,
        "what --max-restarts limits; total: all restarts, as under torchrun; progress: restarts in a row after which "
        "no rank on the leader reached a later saferun.step than in all attempts before",
    ),
    _option(
        "--host-timeout SECONDS",
        Defaults.host_timeout_s,
        FAILURES,
        "seconds without a heartbeat after which a host counts as lost, unless its ranks make progress. If this is not "
        "given, and no other attempt can follow, a host that may come back is waited for as long as --hang-timeout",
    ),
    _option(
        "--stop-with-parent {auto,on,off}",
        "auto",
        FAILURES,
        "stop the ranks when the parent process exits; auto: if a scheduler or MPI started saferun, not in a shell",
    ),
    _option(
        "--run-dir DIR",
        None,
        OUTPUT,
        "directory for the files of this run (default: saferun-runs/<time>-<id>); none: no files",
    ),
    _option(
        "--keep-output SIZE",
        "all",
        OUTPUT,
        "how large each file with the output of a rank may become in the run directory, as 100M or 2G (at least 64K): "
        "beyond that its beginning and its end are kept, and a line marks what is left out",
    ),
    _option(
        "--keep-runs N",
        0,
        OUTPUT,
        "remove old runs from saferun-runs, beyond the newest N; never one that may still run, or that failed or was "
        "stopped in the last 7 days; 0: remove nothing",
    ),
    _option(
        "--prefix TEMPLATE",
        None,
        OUTPUT,
        "prefix of every output line, from {host} {host_digits} {rank} {local_rank} {role}; none: no prefix "
        "(default: '[{host}:{rank}] ')",
    ),
    _option(
        "--pty {auto,on,off}",
        "auto",
        OUTPUT,
        "give the ranks pseudo-terminals; auto: if saferun itself writes to a terminal",
    ),
    _option(
        "--attach RANK|auto|any|off",
        "auto",
        OUTPUT,
        "which rank has the keyboard; auto: if saferun is in the foreground of a terminal, the rank that asks "
        "(breakpoint, input); RANK: this one; any: as auto, and each rank has a terminal as stdin even if saferun has "
        "none, for saferunctl attach; off: ranks have saferun's stdin, as with torchrun",
    ),
    _option(
        "--color {auto,always,never}",
        "auto",
        OUTPUT,
        "colour the prefixes by rank, and saferun's own messages; auto: on a terminal, unless NO_COLOR is set",
    ),
    _option(
        "--fold {on,off}",
        "on",
        OUTPUT,
        "show a traceback that several ranks print once, and name the other ranks; only if the run directory keeps all "
        "copies, and not with --tee, --redirects, --log-line-prefix-template, --prefix none",
    ),
    _option(
        "--console {auto,shared,own}",
        "auto",
        OUTPUT,
        "whether all hosts write to one console, where the leader alone reports; auto: shared if srun, mpirun or the "
        "like started saferun, unless its stderr is a file or a terminal of its own",
    ),
    _option(
        "--bar-interval SECONDS",
        Defaults.bar_interval_s,
        OUTPUT,
        "seconds between lines of a progress bar if the console is not a terminal; its last state is always printed",
    ),
    _option(
        "--report-html {failure,always,off}",
        Defaults.report_html,
        OUTPUT,
        "when to make report.html in the run directory, a page about the run to read and share; failure: at every "
        "hang and failure; always: at every end, with report.json and report.txt; off: never",
    ),
    _option(
        "--on-event COMMAND",
        "",
        OUTPUT,
        "command to run at every hang, failure, restart, recovery and end; it gets the event as JSON on its stdin",
    ),
    _option("--metrics FILE", "", OUTPUT, "file to write metrics to every 15 s, for node_exporter; ends in .prom"),
    _option(
        "--metrics-port PORT",
        "",
        OUTPUT,
        "serve the leader's metrics to Prometheus at http://127.0.0.1:PORT/metrics; ADDRESS:PORT to listen on another "
        "address, :PORT on all addresses; 0: a free port, which is printed",
    ),
    _option(
        "--hang-timeout SECONDS",
        300.0,
        HANGS,
        "seconds without progress on any rank after which the job is reported as hung; 0: never. The default is "
        "well below NCCL's timeout of 600 s, which aborts the ranks before their stacks can be captured",
    ),
    _option(
        "--on-hang {report,stop,restart}",
        "report",
        HANGS,
        "what to do after a certain hang has been captured and reported: leave the job running, stop it, or restart it "
        "(counts towards --max-restarts)",
    ),
    _option(
        "--external-wait-timeout SECONDS",
        1200.0,
        HANGS,
        "seconds without progress after which a hang counts as certain if the blocking rank waits for something "
        "outside the job: a sleep, a server, a file lock, a child process. Until then it is suspected, and --on-hang "
        "does not act. Unless it is set, a longer timeout of the process group counts instead; 0: certain after "
        "--hang-timeout",
    ),
    _option(
        "--capture-budget SECONDS",
        20.0,
        HANGS,
        "seconds that capturing stacks and process states may take before ranks are stopped; 0: capture nothing",
    ),
    _option(
        "--cause-wait SECONDS",
        10.0,
        HANGS,
        "seconds that ranks get to show their error before they are stopped, if the rank that failed first only "
        "lost its connection to another rank or waited too long for it; 0: none",
    ),
    _option(
        "--slow-window SECONDS",
        60.0,
        HANGS,
        "seconds over which ranks are compared to find one that the others wait for in every step; longer if steps "
        "are long; 0: never",
    ),
    _option(
        "--slow-dumps SECONDS",
        0.0,
        HANGS,
        "also compare ranks that use GPUs: ask each rank for its Flight Recorder every so many seconds, 60 at least, "
        "which costs it some milliseconds; 0: never",
    ),
    _option(
        "--native-stacks {auto,always,never}",
        "auto",
        HANGS,
        "capture C and C++ frames as well; auto: of the few ranks that differ from the rest, if their stacks end in C",
    ),
    _option("--strace", False, HANGS, "count the system calls of hung ranks for a second, if strace is installed"),
    _option(
        "--cores {backtrace,keep,off}",
        "backtrace",
        HANGS,
        "core files of crashed ranks; backtrace: read the stacks and delete the core, unless the limit on cores "
        "(`ulimit -c`) was above 0 at the start; keep: read and keep it; off: leave cores alone",
    ),
    _option("--keep-cores N", 4, HANGS, "with --cores keep: how many cores to keep at most, one of each kind of crash"),
    _option("--gdb", False, HANGS, "also read cores with gdb (slow); otherwise gdb is used only if pystack is missing"),
    _option(
        "--pdb",
        False,
        HANGS,
        "open a debugger in the first rank of the job that an exception ends, on the terminal or for saferunctl "
        "attach; ranks that fail meanwhile wait. The exit code is that of the exception",
    ),
    _option(
        "--pdb-timeout SECONDS",
        1800.0,
        HANGS,
        "with --pdb: seconds without input after which the prompt gets EOF; 0: never",
    ),
    _option(
        "--no-inject",
        False,
        HANGS,
        "do not put saferun's start-up hook into the ranks; without the hook saferun cannot read the Flight Recorders "
        "of running ranks, nor stacks if ptrace is denied",
    ),
    _option(
        "--trace-calls PACKAGES",
        "",
        HANGS,
        "record the last Python calls of each rank's threads, for reports of hangs and crashes: calls of these "
        "packages, modules and directories; script: of the modules beside the script. Costs about a microsecond a call",
    ),
    _option("--trace-lines RANK", -1, HANGS, "also record the lines of this rank, which slows it down; -1: of none"),
    _option(
        "--env-profile NAME,NAME",
        ("production",),
        ENVIRONMENT,
        "sets of environment variables for the ranks, applied from left to right; see saferunctl env list",
        kind="list",
    ),
    _option(
        "--env-profile-path PATH",
        (),
        ENVIRONMENT,
        "directory or file with more env profiles; can be given several times",
        kind="append",
    ),
    _option(
        "--wrap RANKS:COMMAND",
        (),
        SCRIPT,
        "run some ranks under a tool: 0:nsys, or '0,4-7:strace -f -o {rank_dir}/strace.txt'; *: all ranks; local:0; "
        "host:NAME; can be given several times",
        kind="append",
    ),
    _option(
        "--env NAME[=VALUE]",
        (),
        ENVIRONMENT,
        "set this variable for the ranks, overriding profiles and the environment; can contain {rank}, "
        "{local_rank}, {host}, {run_dir}, {rank_dir}; NAME alone takes the value from the environment, which keeps "
        "a secret out of ps; can be given several times",
        kind="append",
    ),
    _option(
        "--unset NAME",
        (),
        ENVIRONMENT,
        "remove this variable from the environment of the ranks; can be given several times",
        kind="append",
    ),
    _option(
        "--vendor {auto,nvidia,amd,none}",
        "auto",
        ENVIRONMENT,
        "GPU vendor that the env profiles apply to; auto: that of this host",
    ),
    _option(
        "--lint {on,off}",
        "on",
        ENVIRONMENT,
        "check, while the job runs, for variables that no installed library reads and for implausible values",
    ),
    _option(
        "--config FILE",
        None,
        SETTINGS,
        "YAML file with settings, as OPTION: value (default: ./saferun.yaml, if no other user can write to it)",
    ),
    _option("--show-config", False, SETTINGS, "print every setting and where it comes from, and exit", asks=True),
    _option("--dry-run", False, SETTINGS, "print ranks, commands and changes to the environment, and exit", asks=True),
)
OPTIONS: tuple[Option, ...] = TORCHRUN_OPTIONS + SAFERUN_OPTIONS
