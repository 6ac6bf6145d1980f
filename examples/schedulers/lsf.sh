#!/bin/bash
# LSF: 4 hosts with 8 GPUs each. bsub < lsf.sh
#BSUB -J train
#BSUB -n 4
#BSUB -R span[ptile=1]
#BSUB -gpu num=8
#BSUB -W 24:00
# Without -z blaunch starts a process for each slot.
blaunch -z "$(printf '%s\n' $LSB_MCPU_HOSTS | awk 'NR % 2' | xargs)" saferun --nproc-per-node 8 train.py
