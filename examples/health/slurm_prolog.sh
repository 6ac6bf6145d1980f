#!/bin/sh
# A prolog: slurmd runs it as root on each node of a job before the first step. Where it does not exit with 0, Slurm
# drains the node and puts the job back into the queue. So nothing but a fault of the node may end it with 1.
#
#   slurm.conf:  Prolog=/etc/slurm/slurm_prolog.sh
#                PrologFlags=Alloc
set -u
SAFERUNCTL=${SAFERUNCTL:-/opt/saferun/bin/saferunctl}

"$SAFERUNCTL" health --brief --timeout 20 --path /scratch
[ $? -ne 1 ]
