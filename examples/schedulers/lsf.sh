#!/bin/bash
# LSF: 4 hosts with 8 GPUs each. bsub < lsf.sh
#BSUB -J train
#BSUB -n 4
#BSUB -R span[ptile=1]
#BSUB -gpu num=8
#BSUB -W 24:00
# bkill sends SIGINT, SIGTERM and SIGKILL, with JOB_TERMINATE_INTERVAL (10 s unless the site has changed it) between them;
# to a parallel job the first two only with LSB_USE_SEQUENTIAL_SIGNAL=y in lsf.conf. So --shutdown-timeout is shorter than
# that: there is a report about ranks that do not stop, too.
#
# Without -z blaunch starts a process for each slot.
blaunch -z "$(printf '%s\n' $LSB_MCPU_HOSTS | awk 'NR % 2' | xargs)" saferun --nproc-per-node 8 --shutdown-timeout 8 train.py
