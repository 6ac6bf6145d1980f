"""The stores, the rendezvous, and the messages between hosts, in a process of its own, which imports torch.

No other room imports it, and nothing here decides about ranks: it answers requests and reports what it receives. What
it imports of torch it imports late, and as little as works. (ARCHITECTURE.md lists who else imports torch.) Three files
run elsewhere: ``trial_server`` and ``trial_member`` in trials, ``run_path`` in a rank. What has a similar name here:

``host_coordinator``, ``attempt``, ``ended_attempts``
    What a coordinator does for its host; an attempt (the supervisor's: ``cluster/job_attempt``); what is left of one.
``heartbeats``, ``liveness``, ``liveness_probe``, ``host_probe``, ``gone_hosts``
    Sent and awaited; whether a silent host is gone; the probe for that; whether a host is up at all, before the hosts
    have met; whether one that came has ended since.
``control_finder``, ``control_search``, ``store_search``, ``leader_address``
    How a static job finds the control store: all steps; at several addresses; one store; the leader's address.
``leader_search``, ``successor_search``
    Likewise in an elastic job, and after the leader was lost.
``torch_store``, ``prefix_store``, ``store_client``, ``store_connection``
    torch's store; a part of one that looks like a whole; bounded access to any store; a client without torch.
"""
