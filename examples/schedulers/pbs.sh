#!/bin/bash
# OpenPBS and PBS Professional: 4 hosts with 8 GPUs each. qsub pbs.sh
#PBS -N train
#PBS -l select=4:ncpus=64:ngpus=8:mpiprocs=1
#PBS -l place=scatter
#PBS -l walltime=24:00:00
# qdel sends SIGTERM, and SIGKILL after kill_delay (10 s unless the site has changed it). So --shutdown-timeout is shorter
# than that: there is a report about ranks that do not stop, too.
#
# pbsdsh starts a process on each host, without the list of hosts, in the home directory, and without this environment.
cd "$PBS_O_WORKDIR" || exit
sort -u "$PBS_NODEFILE" > "hosts.$PBS_JOBID"
pbsdsh -- "$(command -v bash)" -lc "cd '$PWD' && exec '$(command -v saferun)' --hostfile 'hosts.$PBS_JOBID' --nproc-per-node 8 --shutdown-timeout 8 train.py"
