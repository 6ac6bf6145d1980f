"""A cluster of real hosts on one machine, for tests.

A host is a set of namespaces (pid, mount, UTS, IPC, network) with a PID 1, a name, an /etc, /run, /tmp, /dev/shm and
/proc of its own, an sshd, and three NICs: ``eth0`` (management), ``eth1`` (data), and a ``docker0`` that has the
address 172.17.0.1 on every host. /srv is shared by all hosts; everything else on disk is the machine's. CPUs, memory,
clock and cgroups are shared with the machine. There is no route to anywhere else.

In a test, with the fixtures of ``tests/cluster/conftest.py``::

    def test_a_job_over_four_hosts(cluster: Cluster, tmp_path: Path) -> None:   # 4 hosts with Slurm, healthy
        script = tmp_path / "train.py"                # tmp_path is visible on every host, and shared by all
        script.write_text("import os; print('rank', os.environ['RANK'])")
        job = srun(cluster, [sys.executable, "-m", "saferun", script], cwd=tmp_path)
        job.wait_for(r"rank 3")                       # regular expression, stdout or stderr
        cluster.hosts[2].cut("eth1")                  # any fault; the next test gets a healthy cluster all the same
        assert job.finish() == 1, job.story("wrong exit code")

    def test_many(make_cluster: MakeCluster) -> None:
        cluster = make_cluster(64)                    # ended with the test; make_cluster(2, slurm=True) has Slurm

* ``cluster``: ``hosts``, ``cluster["node2"]``, ``shared`` (/srv from outside), ``power_on(host)``, ``heal()``,
  ``strays()`` (what runs besides the hosts' daemons), ``await_slurm()``.
* A host: ``name``, ``index`` (from 0), ``management``, ``data`` (addresses), ``addresses`` (both); ``run([...])`` to
  the end, ``popen([...])`` -> ``Process``; ``pids(pattern)``, ``kill(pid, signum)``, ``freeze(pids)``, ``thaw(pids)``,
  ``outer_pid(inner)``; ``path("/etc/hosts")`` from outside; ``in_network("ip", "neigh")``.
* Faults of a host: ``cut(nic, how="network"|"cable"|"down")`` and ``heal(nic)``;
  ``firewall(port, how="drop"|"reject"|"prohibit", peer=, nic=, new_only=)``, ``block_peer(other)``, ``unfirewall()``;
  ``deafen(other, nic)`` (one direction); ``slow(nic, delay_ms=, loss=)``, ``swallow(nic, longest_bytes)`` (an MTU black
  hole) and ``unslow()``; ``throttle(nic, bytes_s)`` and ``unthrottle()``; ``break_name(name, address|None)`` and
  ``mend_names()``; ``occupy(port, answer=)``; ``fill_shared_memory()``, ``limit_files(count)``,
  ``shift_clock(seconds)``, ``fake_torch(version)`` and ``cure()``; ``power_off()`` (silent), ``die()`` (its connections
  are closed).
* ``Process`` is a Popen whose pid is the machine's, so that signals reach it and /proc/PID can be read; with ``out``,
  ``err``, ``wait_for(pattern)``, ``finish()``, ``story(what)``. What a test leaves running is ended after it.
* Launchers (``launchers``): ``srun``, ``mpirun``, ``hydra`` (``tasks_per_host=``), ``pdsh``, ``by_hand`` (a command a
  host), all with ``hosts=``, ``options=``, ``env=``, ``cwd=``.

Pids are the machine's unless called *inner*: those are what a host's processes know and print.
"""
