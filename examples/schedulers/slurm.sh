#!/bin/bash
# Slurm: 4 hosts with 8 GPUs each; also on AWS ParallelCluster. sbatch slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
# --signal: two minutes before the end of --time every process of the step gets SIGUSR1, on which train.py saves a
# checkpoint and ends. A train.py that does not handle SIGUSR1 is killed by it: then delete that line.
#
# --cpus-per-task: all CPUs of a host, which its ranks share. srun does not take it from sbatch since Slurm 22.05.
#
# scancel, and the end of --time, send SIGTERM, and SIGKILL after KillWait (30 s unless the site has changed it). So
# --shutdown-timeout is shorter than that: there is a report about ranks that do not stop, too.
#
# KillOnBadExit and --kill-on-bad-exit are not needed: when a rank fails, saferun ends on all hosts.
#
# A fifth host as a spare: --nodes=5 and --no-kill above (Slurm would end the job when a host fails), and instead of the
# last line (KillOnBadExit=1 in slurm.conf would end the step when the saferun process of a host is killed):
#   srun --no-kill --kill-on-bad-exit=0 --cpus-per-task=64 saferun --nnodes 4 --spares 1 --nproc-per-node 8 --shutdown-timeout 20 train.py
srun --cpus-per-task=64 saferun --nproc-per-node 8 --shutdown-timeout 20 train.py
