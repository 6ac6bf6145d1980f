"""Names of system call numbers, for calls in which a process may wait.

Sources: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (arm64) of Linux.
"""

from __future__ import annotations

import os

from saferun.linux.small_files import has_own_processes
from saferun.model import Value


class SystemCall(Value):
    """A thread's system call. ``name`` is ``system call 999`` if the number is unknown; ``arguments`` are raw."""

    name: str
    arguments: tuple[int, ...]


# From number 424 on all architectures have the same numbers.
_ALIKE = """
426 io_uring_enter  435 clone3  436 close_range  437 openat2  439 faccessat2  441 epoll_pwait2  449 futex_waitv
452 fchmodat2  455 futex_wait
"""
_X86_64 = """
0 read  1 write  2 open  3 close  4 stat  5 fstat  6 lstat  7 poll  9 mmap  10 mprotect  11 munmap  12 brk  16 ioctl
17 pread64  18 pwrite64  19 readv  20 writev  21 access  23 select  24 sched_yield  26 msync  28 madvise  33 dup2
34 pause  35 nanosleep  40 sendfile  42 connect  43 accept  44 sendto  45 recvfrom  46 sendmsg  47 recvmsg
48 shutdown  56 clone  57 fork  58 vfork  59 execve  60 exit  61 wait4  65 semop  69 msgsnd  70 msgrcv  72 fcntl
73 flock  74 fsync  75 fdatasync  76 truncate  77 ftruncate  82 rename  83 mkdir  84 rmdir  85 creat  86 link
87 unlink  88 symlink  89 readlink  90 chmod  128 rt_sigtimedwait  130 rt_sigsuspend  137 statfs  138 fstatfs
149 mlock  162 sync  165 mount  166 umount2  187 readahead  188 setxattr  191 getxattr  192 lgetxattr  194 listxattr
202 futex  208 io_getevents  217 getdents64  219 restart_syscall  220 semtimedop  230 clock_nanosleep  231 exit_group
232 epoll_wait  235 utimes  242 mq_timedsend  243 mq_timedreceive  247 waitid  257 openat  258 mkdirat  262 newfstatat
263 unlinkat  264 renameat  265 linkat  266 symlinkat  267 readlinkat  268 fchmodat  269 faccessat  270 pselect6
271 ppoll  275 splice  277 sync_file_range  278 vmsplice  280 utimensat  281 epoll_pwait  285 fallocate  288 accept4
292 dup3  295 preadv  296 pwritev  299 recvmmsg  306 syncfs  307 sendmmsg  310 process_vm_readv  316 renameat2
318 getrandom  326 copy_file_range  327 preadv2  328 pwritev2  332 statx
"""
_ARM64 = """
4 io_getevents  5 setxattr  8 getxattr  9 lgetxattr  11 listxattr  22 epoll_pwait  24 dup3  25 fcntl  29 ioctl
32 flock  34 mkdirat  35 unlinkat  36 symlinkat  37 linkat  38 renameat  39 umount2  40 mount  43 statfs  44 fstatfs
45 truncate  46 ftruncate  47 fallocate  48 faccessat  53 fchmodat  56 openat  57 close  61 getdents64  63 read
64 write  65 readv  66 writev  67 pread64  68 pwrite64  69 preadv  70 pwritev  71 sendfile  72 pselect6  73 ppoll
75 vmsplice  76 splice  78 readlinkat  79 newfstatat  80 fstat  81 sync  82 fsync  83 fdatasync  84 sync_file_range
88 utimensat  93 exit  94 exit_group  95 waitid  98 futex  101 nanosleep  115 clock_nanosleep  124 sched_yield
128 restart_syscall  133 rt_sigsuspend  137 rt_sigtimedwait  182 mq_timedsend  183 mq_timedreceive  188 msgrcv
189 msgsnd  192 semtimedop  193 semop  202 accept  203 connect  206 sendto  207 recvfrom  210 shutdown  211 sendmsg
212 recvmsg  213 readahead  214 brk  215 munmap  220 clone  221 execve  222 mmap  226 mprotect  227 msync  228 mlock
233 madvise  242 accept4  243 recvmmsg  260 wait4  267 syncfs  269 sendmmsg  270 process_vm_readv  276 renameat2
278 getrandom  285 copy_file_range  286 preadv2  287 pwritev2  291 statx
"""
_TABLES = {
    machine: dict(zip(map(int, tokens[::2]), tokens[1::2], strict=True))
    for machine, tokens in (("x86_64", (_X86_64 + _ALIKE).split()), ("aarch64", (_ARM64 + _ALIKE).split()))
}

_FD_CALLS = """
read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 ioctl connect accept accept4 sendto
recvfrom sendmsg recvmsg recvmmsg sendmmsg shutdown fcntl flock fsync fdatasync ftruncate fallocate syncfs
sync_file_range readahead getdents64 fstat fstatfs epoll_wait epoll_pwait epoll_pwait2 splice vmsplice
sendfile copy_file_range io_uring_enter
"""
_TAKES_FD = frozenset(_FD_CALLS.split())


def from_proc_syscall(content: str, machine: str) -> SystemCall | None:
    """Parse /proc/PID/syscall; None if the thread is in none (it runs, or sleeps in a page fault).

    Source: proc_pid_syscall(5).
    """
    fields = content.split()
    try:
        number = int(fields[0])
        arguments = tuple(int(field, 16) for field in fields[1:7])
    except (IndexError, ValueError):
        return None
    if number < 0:
        return None
    return SystemCall(_TABLES.get(machine, {}).get(number, f"system call {number}"), arguments)


def read_syscall(pid: int, tid: int = 0) -> SystemCall | None:
    """The system call that a thread (by default the main one) is in; None if it is in none, or not readable.

    Blocks only before Linux 5.7, and where ``procfs.may_wait_for_exec`` says so.
    """
    if not has_own_processes():
        return None
    try:
        with open(f"/proc/{pid}/task/{tid or pid}/syscall", "rb") as file:
            content = file.read(512)
    except OSError:
        return None
    return from_proc_syscall(content.decode("ascii", "replace"), os.uname().machine)


# Kernel functions of the calls that the kernel restarts. A sleep has none of its own then, as compilers make jumps of
# the calls that lead to it: the function before these is seen (Linux 6.18, x86-64).
_RESTARTED = (
    *(("poll_schedule", "poll"), ("futex", "futex"), ("hrtimer_nanosleep", "clock_nanosleep")),
    *(("do_syscall_64", "clock_nanosleep"), ("__x64_sys_restart_syscall", "clock_nanosleep")),
    *(("invoke_syscall", "clock_nanosleep"), ("__arm64_sys_restart_syscall", "clock_nanosleep")),
)


def before_restart(call: SystemCall | None, wchan: str) -> SystemCall | None:
    """The call that a process was in before it was stopped and continued, if ``wchan`` tells; else the call itself.

    After a stop, as by Ctrl-Z or a debugger, the kernel resumes a timed wait as ``restart_syscall``; the arguments are
    still those of the original call. Source: restart_syscall(2).
    """
    if call is None or call.name != "restart_syscall":
        return call
    names = [name for start, name in _RESTARTED if wchan.startswith(start)]
    return SystemCall(names[0], call.arguments) if names else call


def descriptor_of(call: SystemCall) -> int | None:
    """The file descriptor that a call works on (its first argument); None if it takes none.

    Not of ``close``: where that waits, the number is free already, and may be another file's. Source: close(2).
    """
    if call.name not in _TAKES_FD or not call.arguments:
        return None
    fd = call.arguments[0] & 0xFFFFFFFF
    return fd if fd < 1 << 31 else None
