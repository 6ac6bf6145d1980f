"""Several hosts of one job: where they come from, how they meet, and their messages.

A host speaks for itself and host 0 decides. What comes from another host is bounded and checked before it is
believed, and whatever is wrong with it ends nothing. What has a similar name here:

``job_interface``, ``job``, ``solo_job``, ``job_attempt``
    What the loop knows of a job; one of several hosts; one of a single host; one attempt, as this host sees the others.
``job_channel``, ``coordinator_client``, ``coordinator_process``, ``torch_process``
    Listening sockets and the coordinator; its start, messages and end; the connection to it; one that has only torch.
``silence``, ``silent_hosts``, ``progress``, ``asked_progress``
    The rule for a silent host; which are silent; whether the ranks here make progress; whether those elsewhere do.
    (Hosts are probed in ``coordinator/liveness``.)
``evidence_exchange``, ``evidence_collection``, ``evidence/``
    Handed in here, and merged on the leader; the chunks that it waits for; how they are packed and merged. (What
    evidence is: the package ``saferun.evidence``. Its way through the control store: ``coordinator/evidence_chunks``.)
``messages``, ``join_messages``, ``rendezvous_messages``
    Entries of the job's log; what supervisor and coordinator exchange as the hosts meet; the supervisor's side of it.
"""
