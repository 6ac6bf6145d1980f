"""The settings of a launch, once all options are resolved."""

from __future__ import annotations

from saferun.model import Defaults, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    Origin = Literal["default", "profile", "file", "environment", "flag"]
else:
    Origin = str


DEFAULT_PORT = 29500  # torchrun's, for several hosts that were given none
DEFAULT_RDZV_ID = "none"
DEFAULT_PREFIX = "[{host}:{rank}] "
DEFAULT_SHUTDOWN_TIMEOUT_S = 30
DEFAULT_TRIAL_TIMEOUT_S = 30.0  # of saferunctl doctor
KEEP_NO_FILES = "none"
# A host is probed after this share of --host-timeout without a heartbeat; probing takes the rest, 6 s at most.
_SILENT_SHARE = 0.8


class Command(Value):
    """What each rank runs.

    ``argv[0]`` is taken as it is; in the rest ``$local_rank`` is replaced. With ``run_path`` argv is the script and
    its arguments, run by saferun's own entry point in the rank. ``is_python``: whether saferun's own interpreter runs
    the script; else any program does (``--no-python``, PYTHON_EXEC).
    """

    argv: tuple[str, ...]
    run_path: bool
    name: str
    is_python: bool = True


class RendezvousConfig(Value):
    """How the hosts of the job meet.

    ``master_addr`` None: this host's own name. ``master_port`` None: the kernel chooses.
    ``agent_store``: whether the launcher serves the store (TORCHELASTIC_USE_AGENT_STORE for the ranks).

    In a job of several hosts, with ``static``, ``ports`` are those where the master may be found, the first free one
    being taken: the given one, or several that follow from the scheduler's job where none was given. With the other
    backends ``endpoint`` and ``conf`` (``--rdzv-conf``) are handed to torch's rendezvous handlers; ``address`` is the
    host and port that ``endpoint`` names, if it names any. ``is_master_given``: False if nothing names the master's
    host, so that each host looks on itself. ``control``: the port for the job's own messages, a number,
    ``same`` as that of the ranks' store, or ``auto``. ``port_source``: where the port's number comes from, one of the
    constants of ``text.master_port``. ``note``: what the user should know of the address at the start; empty: nothing.
    """

    backend: str
    run_id: str
    master_addr: str | None
    master_port: int | None
    local_addr: str | None
    agent_store: bool = True
    ports: tuple[int, ...] = ()
    endpoint: str = ""
    address: tuple[str, int] | None = None
    conf: tuple[tuple[str, str], ...] = ()
    control: str = "auto"
    port_source: str = "needless"
    is_master_given: bool = True
    note: str = ""

    @property
    def outlives_job(self) -> bool:
        """Whether the hosts meet in a file, or in what is served by something else than the job (etcd)."""
        return self.backend not in {"static", "c10d"} or dict(self.conf).get("store_type") == "file"

    @property
    def has_default_address(self) -> bool:
        """Whether the hosts meet where every job meets that names neither port nor id, so that two jobs may mix."""
        return self.backend == "static" and self.ports == (DEFAULT_PORT,) and self.run_id == DEFAULT_RDZV_ID


class TaskConfig(Value):
    """This process is one of several saferuns of a host, each with one rank: ``srun --ntasks-per-node=8``.

    Attributes:
        local_rank: its place on the host; 0 is the host's head.
        local_world_size: how many there are on this host.
        key: what only the tasks of one job on one host have in common: ``slurm-4711-0``.
    """

    local_rank: int
    local_world_size: int
    key: str


class HostsConfig(Value):
    """The hosts of the job, and this one's place among them, as far as they are known before the hosts meet.

    Attributes:
        least, most: how many hosts the job may have.
        node_rank: this host's; None: decided by the rendezvous.
        names: the hosts in order of node rank; empty: unknown.
        task: where this host has one saferun per rank; None: this is the only one.
        detected: where the place comes from, for people: ``Slurm step 4711.0``; empty: from options.
        found: where each value of it stands: ``node rank 2: SLURM_NODEID=2``.
        start_timeout_s: how long late hosts are waited for.
        connect_timeout_s: how long the store is waited for at which they meet; 0: as long as late hosts.
        host_timeout_s: for how long a host may be silent before it counts as lost.
        stop_with_parent: whether to stop the ranks when the parent process exits.
        note: what the user should know of all this at the start; empty: nothing.
        shares_console: whether all of them write to one console: then one of them speaks for all.
        prints_start_lines: whether this process is the one that prints there what all of them know at the start.
        spares: how many hosts beside those of the job wait to take the place of one.
        by_handler: whether a rendezvous handler that is not torch's own says who takes part, whatever ``most`` is.
    """

    least: int = 1
    most: int = 1
    node_rank: int | None = 0
    names: tuple[str, ...] = ()
    task: TaskConfig | None = None
    detected: str = ""
    found: tuple[str, ...] = ()
    start_timeout_s: float = Defaults.start_timeout_s
    connect_timeout_s: float = 0.0
    host_timeout_s: float = Defaults.host_timeout_s
    stop_with_parent: bool = False
    note: str = ""
    shares_console: bool = False
    prints_start_lines: bool = True
    spares: int = 0
    by_handler: bool = False

    @property
    def probe_after_s(self) -> float:
        """For how long a host may be silent before it is probed."""
        return self.host_timeout_s * _SILENT_SHARE

    @property
    def started(self) -> int:
        """How many hosts are started at most, spares included."""
        return self.most + self.spares

    @property
    def may_have_others(self) -> bool:
        """Whether there are, or may be, other hosts of the job."""
        return self.started > 1 or self.by_handler

    @property
    def spans_hosts(self) -> bool:
        """Whether this process is not alone: there are, or may be, others of the job."""
        return self.may_have_others or self.task is not None


class JobMembership(Value):
    """This host's membership in the job, as it is known while the rest of a launch may yet prove to be impossible."""

    hosts: HostsConfig
    rendezvous: RendezvousConfig
    secret_file: str = ""


class LogConfig(Value):
    """torchrun's options about streams. ``redirects`` and ``tee``: one mask (1 stdout, 2 stderr) a local rank."""

    log_dir: str | None
    redirects: tuple[int, ...]
    tee: tuple[int, ...]
    local_ranks_filter: frozenset[int]
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    logs_specs: str | None


class OutputConfig(Value):
    """saferun's options about streams.

    ``run_dir`` None: the default place; ``keep_files`` False: no run directory at all.
    ``prefix`` None: no prefix. ``legacy_template``: torchrun's ``--log-line-prefix-template``.
    ``fold``: whether tracebacks that several ranks print are shown once. ``bar_interval_s``: how often a progress bar
    is a line, where there is no terminal. ``report_html``: when report.html is made. ``keep_runs``: how many runs are
    kept in the default place, 0: all. ``keep_bytes``: how much is kept of what a rank writes to a stream, 0: all.
    ``on_event``: the command that gets the events of the launch; empty: none.
    ``attach``: which rank has the keyboard: auto, the one that asks, where saferun itself has one; any: the same, and
    every rank has a terminal as stdin; off: all ranks have saferun's stdin.
    ``metrics``: the file for metrics; empty: none. ``metrics_port``: an address and a port for them; None: none.
    """

    run_dir: str | None
    keep_files: bool
    prefix: str | None
    legacy_template: str | None
    pty: Literal["auto", "on", "off"]
    color: Literal["auto", "always", "never"]
    fold: bool = False
    bar_interval_s: float = Defaults.bar_interval_s
    report_html: Literal["failure", "always", "off"] = Defaults.report_html
    keep_runs: int = 0
    keep_bytes: int = 0
    on_event: tuple[str, ...] = ()
    attach: Literal["auto", "any", "off"] | int = "auto"
    metrics: str = ""
    metrics_port: tuple[str, int] | None = None


class EnvironConfig(Value):
    """What is asked for about the environment of the ranks. ``env`` are names and values."""

    profiles: tuple[str, ...]
    profile_path: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    unset: tuple[str, ...]
    vendor: Literal["auto", "nvidia", "amd", "none"]
    lint: bool


class WatchConfig(Value):
    """What is asked for about hangs and crashes.

    ``hang_timeout_s`` 0: no hang detection; ``capture_budget_s`` 0: nothing is captured; ``cause_wait_s``: how long the
    cause of a victim's failure is waited for; ``slow_window_s``: over how long ranks are compared, 0: not at all;
    ``slow_dumps_s``: how often they are by their Flight Recorders, 0: never; ``external_wait_s``: for how long nothing
    may move where a rank waits for something outside the job, 0: no longer than elsewhere; ``external_wait_asked``:
    whether the user has set it, so that longer timeouts of process groups do not count. ``trace_calls``: the
    directories and packages whose calls the ranks record, empty: they record none; ``trace_lines``: the rank that
    records lines as well, -1: none. ``pdb``: the first rank that fails with an exception opens a debugger, which ends
    when nothing is typed for ``pdb_timeout_s``, 0: never.
    """

    hang_timeout_s: float
    on_hang: Literal["report", "stop", "restart"]
    capture_budget_s: float
    cause_wait_s: float
    native: Literal["auto", "always", "never"]
    strace: bool
    cores: Literal["backtrace", "keep", "off"]
    keep_cores: int
    gdb: bool
    inject: bool
    cores_asked: bool = False  # the user has asked for cores
    slow_window_s: float = 0.0
    slow_dumps_s: float = 0.0
    external_wait_s: float = 0.0
    external_wait_asked: bool = False
    trace_calls: tuple[str, ...] = ()
    trace_lines: int = -1
    pdb: bool = False
    pdb_timeout_s: float = 0.0


class ChecksConfig(Value):
    """What is asked for about the checks before the ranks are started.

    ``nics``: network interfaces to use; ``("auto",)``: to be chosen. ``full``: every pair of hosts is tried.
    ``as_json``: how the results are printed where nothing else is wanted. ``collective``: whether real collectives are
    tried, by torch's ``backend``, each for ``trial_timeout_s`` at most. ``health``: ``quick`` checks of each host, a
    real computation as well (``full``), or ``off``; ``health_paths``: storage that has to answer.
    """

    preflight: Literal["on", "warn", "off", "only"] = Defaults.preflight
    full: bool = False
    nics: tuple[str, ...] = ()
    as_json: bool = False
    collective: bool = False
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    trial_timeout_s: float = DEFAULT_TRIAL_TIMEOUT_S
    health: Literal["quick", "full", "off"] = Defaults.health
    health_paths: tuple[str, ...] = ()


class RetryConfig(Value):
    """When an attempt that failed is followed by another.

    Attributes:
        start_retries: how often a failed start is tried again.
        wait_s: before the first of these.
        start_window_s: after so long a start counts as over where the ranks cannot be asked.
        always: also where the same failure came twice in a row.
        exclude_bad_hosts: whether a host that fails again and again is left out of an elastic job.
        exclude_file: a list to which hosts are added whose own hardware or system is at fault; empty: none.
        by_progress: whether only restarts in a row are limited that got no further.
    """

    start_retries: int = Defaults.start_retries
    wait_s: float = Defaults.retry_wait_s
    start_window_s: float = Defaults.start_window_s
    always: bool = False
    exclude_bad_hosts: bool = False
    exclude_file: str = ""
    by_progress: bool = False


class RankChoice(Value):
    """Which ranks ``--wrap`` is about.

    Attributes:
        ranges: of ranks, or of local ranks, first and last.
        is_local: whether they are local ranks.
        host: the name of a host, all of whose ranks are meant; empty: ``ranges`` says which.
        may_miss: whether it is no mistake where the job has no such rank.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    is_local: bool = False
    host: str = ""
    may_miss: bool = False


class WrapConfig(Value):
    """A tool that some ranks run under.

    Attributes:
        name: the tool.
        ranks: which ranks.
        argv: how it is called, before the rank's own command line; with ``{rank}``, ``{local_rank}``, ``{rank_dir}``.
        cost: of a tool that is known; else empty.
        is_module: it is a module that the rank's Python runs in place of the script.
    """

    name: str
    ranks: RankChoice
    argv: tuple[str, ...]
    cost: str = ""
    is_module: bool = False


class Setting(Value):
    """The value of an option, and where it comes from. ``location`` names the flag, variable or file and line."""

    value: object
    origin: Origin
    location: str = ""


class LaunchConfig(Value):
    """Everything that one launch was asked to do."""

    nproc_per_node: int
    role: str
    command: Command
    rendezvous: RendezvousConfig
    logs: LogConfig
    output: OutputConfig
    environ: EnvironConfig
    watch: WatchConfig
    max_restarts: int
    shutdown_timeout_s: float
    signals: tuple[int, ...]
    numa_binding: str | None
    virtual_local_rank: bool
    event_log_handler: str
    settings: dict[str, Setting]
    argv: tuple[str, ...]
    settings_file: str | None = None
    show_config: bool = False
    dry_run: bool = False
    hosts: HostsConfig = HostsConfig()
    in_batch_job: bool = False  # of a batch system, which sends a signal to all hosts of the job
    in_pod: bool = False  # of Kubernetes
    checks: ChecksConfig = ChecksConfig()
    retry: RetryConfig = RetryConfig()
    wraps: tuple[WrapConfig, ...] = ()
    leftovers: Literal["wait", "end", "leave"] = Defaults.leftovers
    leftovers_timeout_s: float = Defaults.leftovers_timeout_s
    secret_file: str = ""  # with the job's secret; empty: none is named
    # By a secret that the hosts share, where none is named.
    sign_messages: Literal["auto", "off", "required"] = Defaults.sign_messages

    @property
    def shares_secret(self) -> bool:
        """Whether the hosts of the job try to share a secret by themselves."""
        return not self.secret_file and self.sign_messages != "off" and self.hosts.may_have_others

    @property
    def moves_leader(self) -> bool:
        """Whether a spare can take the place of the first host.

        Without most of the hosts, a job that is cut in two could go on in both parts.
        """
        hosts, rendezvous = self.hosts, self.rendezvous
        is_most = 2 * hosts.most > hosts.started
        return hosts.spares > 0 and is_most and rendezvous.backend == "static" and rendezvous.control != "same"

    @property
    def keeps_all_hosts(self) -> bool:
        """Whether no host of an elastic job is left out, since one that ends with exit code 0 would end the others.

        Kubeflow's training operator declares a PyTorchJob with an ``elasticPolicy`` succeeded as soon as one worker
        ends so. It passes the number of hosts as PET_NNODES (pkg/controller.v1/pytorch: pytorchjob_controller.go,
        elastic.go).
        """
        nnodes = self.settings.get("nnodes")
        return self.in_pod and nnodes is not None and nnodes.location == "PET_NNODES"

    @property
    def meets_again(self) -> bool:
        """Whether the hosts meet again where one is gone that torch's rendezvous had counted in, before ranks start.

        The others may be enough. Else a host has to take its place. It is waited for if restarts are asked for; none
        comes within a job of a batch system.
        """
        hosts, is_static = self.hosts, self.rendezvous.backend == "static"
        return not is_static and (hosts.least != hosts.most or (self.max_restarts > 0 and not self.in_batch_job))

    def patience_after_s(self, restarts: int = 0, spares: Sequence[str] = (), *, leads: bool = True) -> float:
        """From when on a silent host is waited for as long as ``--hang-timeout``, although the ranks stand still.

        It may go on: a virtual machine that is moved, a switch that restarts. An earlier end would gain nothing, since
        no other attempt can follow, and ``--host-timeout`` does not ask for it. An elastic job is no exception: it goes
        on with fewer hosts by a restart. A start of it that fails within ``init_process_group`` is tried again, which
        it still is after that wait, unless the hang ends the job first.

        Args:
            restarts: how many there were.
            spares: the hosts that wait to take the place of one.
            leads: False on a host that waits for the leader alone, without which a static job has no other attempt.

        Returns:
            Seconds after the beginning of an attempt; infinite: it never is.
        """
        given = self.settings.get("host_timeout")
        if given is None or given.origin != "default":
            return float("inf")
        if not leads and self.rendezvous.backend == "static":
            return float("inf") if self.moves_leader and spares else 0.0
        # Replacements by spares count as restarts as well, although they use up none.
        is_count_unknown = self.retry.by_progress or self.hosts.spares > 0
        may_restart = restarts < self.max_restarts or (is_count_unknown and self.max_restarts > 0)
        if may_restart or spares:
            return float("inf")
        is_elastic = self.hosts.least != self.hosts.most
        has_no_end = self.watch.hang_timeout_s <= 0  # that wait
        may_end_before = is_elastic and self.retry.start_retries > 0 and (has_no_end or self.watch.on_hang != "report")
        return self.retry.start_window_s if may_end_before else 0.0

    @property
    def checks_here(self) -> bool:
        """Whether there are preflight checks, and this process is the one of its host that makes them."""
        task = self.hosts.task
        return self.checks.preflight != "off" and (task is None or task.local_rank == 0)
