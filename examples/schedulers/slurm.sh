#!/bin/bash
# Slurm: 4 hosts with 8 GPUs each; also on AWS ParallelCluster. sbatch slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# scancel, and the end of --time, send SIGTERM, and SIGKILL after KillWait (30 s unless the site has changed it).
srun saferun --nproc-per-node 8 --shutdown-timeout 20 train.py
