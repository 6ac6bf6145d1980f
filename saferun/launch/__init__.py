"""One launch on this host: the loop, and the parts that it drives.

The loop carries out what the supervisor decides. Once the ranks run it waits for nothing but its poller, and opens no
regular file. What has a similar name here:

``entry``, ``host_launch``, ``event_loop``, ``launch_context``
    ``entry`` turns settings into a HostLaunch and errors into exit codes; the HostLaunch makes the parts of a launch
    and ends them; the loop carries out actions; the context is what all parts share.
``rank_group``, ``rank_streams``, ``exec_wait``, ``rank_actions``, ``rank_hook``
    The processes of one attempt; how their stdout and stderr are opened; from their fork to the last exec; what the
    loop does with them in every attempt; the variables and files of the start-up hook.
``attempt_setup``, ``attempt_end``, ``attempt_record``
    What comes before the ranks of an attempt; what comes after them; what is known of them for a diagnosis.
``investigation``, ``incident_log``, ``incident_failure``, ``incident_hang``
    The part that watches and captures; the list of what has gone wrong so far, and its report; one failure; one hang.
``hang_watch``, ``non_finite``
    From the watchdog to the event that the job hangs; the warning of a loss that is NaN, which is no hang.
``nic_variables``
    The variables that ``--nic`` sets (the interfaces themselves: ``linux/netlink``; those that gloo and NCCL use by
    themselves: ``preflight/default_nics``; the best one: ``preflight/best_nic``).
``lint_part``, ``preflight_part``, ``console_part``
    What the loop has of the rooms ``env/lint``, ``preflight`` and ``console``.
``orphaned_segments``
    Removes what dead ranks leave in /dev/shm (``linux/shm_segments`` finds it; ``preflight/checks`` has a check of its
    size).
"""
