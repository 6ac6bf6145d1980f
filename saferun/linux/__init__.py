"""The system: one file a feature, each with its fallback where a kernel, a container or a build of Python lacks it.

Pythons of conda and uv are built with old headers and lack functions that the kernel has. Kernels from 4.18 on, and
seccomp filters of containers, lack system calls that Python has. So a feature is tried by Python's function, then by
the bare system call (``system_call``), then replaced. Nothing else calls ``os.pidfd_open``, ``os.memfd_create`` or
``os.closerange``; a wake-up between threads is a pipe, not ``os.eventfd``. No function here raises because the system
lacks something, unless its docstring says so.

Processes
    ``children``, ``preforked``, ``program_start``: fork and exec with a report of the step that failed; SpawnError if
    the system refuses. Without a preforked process a rank is forked as usual.
    ``pidfd``, ``poller``: a pidfd; else -1: exits of children are still found by SIGCHLD, others by polling /proc each
    second (``Poller.watch_process``). Signals by pidfd; else by ``os.kill``, which is as good before a child is reaped.
    ``descriptors``: ``close_range``; else the descriptors in /proc/self/fd; else the first 4096.
    ``prctl``: a refused call has no effect. Without PR_SET_PDEATHSIG the ``reaper`` kills the ranks of a supervisor
    that was killed; without PR_SET_CHILD_SUBREAPER orphaned processes are found by the run's id in their environment.
    ``helper``, ``json_lines``, ``child_output``: helper processes and children with a deadline; OSError if the system
    refuses to fork. ``part``: what the loop knows of whatever has one.
    ``ancestors``: the parent processes; none if /proc hides them.
    ``signals``, ``sessions``, ``limits``, ``search_path``, ``start_marks``: what every supported kernel has.
/proc
    ``procfs``, ``activity``, ``small_files``: what has exited, or is not readable, counts as None, 0 or empty. Nothing
    is read that blocks on the lock of another process's memory. A /proc of another PID namespace counts as not mounted.
    ``process_identity``: whether a process lives that another one has named; None if that cannot be seen from here.
    ``stuck``, ``syscalls``: what a process waits for; empty or None if that is not readable.
    ``sockets``, ``sock_diag``: peers of sockets and bytes of TCP connections; without socket diagnostics the peers of
    Unix sockets are unknown, and so are the bytes. ``connections``: whom TCP connections lead to, as /proc shows them.
    ``quiet_sockets``: over which of them nothing moves; without socket diagnostics that is known of none.
Limits
    ``cgroups``, ``process_room``, ``container``: both versions of control groups; without one there is no limit.
    ``memory_limit``, ``core_limits``, ``core_pattern``: a refused limit is left as it is.
Cores
    ``core_files``, ``core_notes``: CoreError for a file that is not a readable core.
    ``core_saving``, ``core_watch``: inotify; without it cores of one name overwrite each other, as without saferun.
    ``handled_cores``: deletes those of crashes that ranks survive; what is not proved to be one is left.
Files
    ``ownership``, ``trusted_files``: files relative to descriptors whose owner was checked; NotOursError.
    ``user_name``: the user's name; the number where there is none.
    ``memory_file``: ``memfd_create``; else an unlinked file in /dev/shm, XDG_RUNTIME_DIR, TMPDIR, /tmp or /var/tmp.
    ``quick_imports``: saferun's own modules; else as Python imports any.
    ``held_code``: modules in memory files; else on the heap, and libraries in their own files.
    ``hook_copy``: the ranks' hook in memory; OSError.
    ``locked_code``: ``mlock2``; else the kernel may drop the code of this process and read it again. ``heap``:
    ``malloc_trim`` of glibc; else the heap keeps what is free.
    ``scratch``: a private directory in TMPDIR; else in /tmp, /var/tmp, /dev/shm, XDG_RUNTIME_DIR, /run/user/UID or the
    current directory; OSError if none can be made. For sockets one with a short path, in memory if possible.
    ``abandoned_scratch``: such directories whose run and reaper were killed; those that others may use are left.
    ``shm_segments``: segments that ranks have left in /dev/shm; none are removed if not all processes can be scanned.
    ``left_output``: what processes that are left running print; it is lost, and ends them, if no process can be forked.
    ``answering_files``: which files are there; one whose file system does not answer counts as missing.
    ``error_files``, ``file_systems``, ``streams``: ranks' error files (None: malformed), types of file systems (empty:
    unknown), pipes, and pseudo-terminals (OSError if there are none). ``keyboard``, ``terminal_mode``: the terminal
    while a rank has it; without the permission to read system calls its reader is found by the kernel function.
    ``terminal_owner``: a process that keeps sessions of ranks from taking their terminal; OSError if it has none.
Network
    ``bare_socket``: sockets without the modules that Python's own import; OSError as theirs.
    ``listen_port``: the port of the ranks' store; SaferunError if it is in use. ``task_sockets``: a Unix socket in a
    private directory; else an abstract one. ``control_socket``: the same, in memory. ``names``: name lookups in a
    separate process, with a deadline.
    ``netlink``, ``nic_state``, ``link_counters``: network interfaces (``nic``) and routes; OSError, or an empty list,
    if the kernel refuses.
    ``munge``: credentials; None if it is not installed. ``nccl_files``: what NCCL's own files set; nothing if they
    cannot be read.
GPUs and torch
    ``gpus``, ``gpu_drivers``, ``gpu_nodes``: the number of GPUs; None if only torch can tell, which is then asked by
    ``installed_torch``. ``installed_versions``: versions from files; those that are missing are left out.
    ``gpu_reading``, ``nvidia_gpus``, ``amd_gpus``: the state of GPUs until a deadline, with the driver call that hangs.
"""
