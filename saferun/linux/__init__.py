"""What touches the operating system: one file a feature, each with what it answers where the system lacks it.

Pythons of conda and uv are built against old headers and lack functions that the kernel has. Kernels from 4.18 on, and
seccomp filters of containers, lack system calls that Python has. So each feature is tried by Python's function, then by
the bare system call (``system_call``), then replaced. Nothing else calls ``os.pidfd_open``, ``os.memfd_create``,
``os.eventfd`` or ``os.closerange``.

``pidfd``
    A descriptor that tells the end of a process; else -1: children are told by SIGCHLD all the same, others are looked
    up in /proc each second (``Poller.watch_process``). A signal through it; else ``os.kill``, which is as good for a
    child that has not been reaped.
``ownership``
    Whose a file is: directories and files opened, made and removed relative to descriptors whose owner was checked.
``descriptors``
    Close all descriptors but a few: ``close_range``; else those that /proc/self/fd lists; else the first 4096.
``memory_file``
    A file that is in no file system: ``memfd_create``; else an unlinked file in /dev/shm, XDG_RUNTIME_DIR, TMPDIR or
    /tmp.
``locked_code``
    The code of this process stays in memory: ``mlock2``; else the kernel may drop it and read it again.
``scratch``
    A private directory in TMPDIR; else in /tmp, /var/tmp, /dev/shm, XDG_RUNTIME_DIR, /run/user/UID, the current
    directory. One whose path is short enough for sockets, in memory if it can be: where there is none, nothing that
    needs a socket is there either, with one line.

A wake-up between threads is a pipe, which every kernel has. The calls of ``prctl.py`` fail by having no effect:
without PR_SET_PDEATHSIG the reaper ends the ranks of a supervisor that was killed, without PR_SET_CHILD_SUBREAPER
orphans are found by the run's id in their environment.
"""
